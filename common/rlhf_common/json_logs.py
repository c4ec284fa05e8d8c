"""Log lines as JSON objects, one per line.

Rule: a line has `time` (UTC, milliseconds), `level`, `message`, and `worker` or `logger`, and the fields of the
`LogContext`. An exception adds `traceback`.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

NAMESPACE: Final = "default"
"""Namespace of a job whose manifest names none."""


class LogContext:
    """Fields that the lines of a process have besides their message, such as job, iteration and trace."""

    def __init__(self) -> None:
        self.present: Callable[[], Mapping[str, Any]] = dict
        """Returns the current fields; any thread that logs calls it, so it must be quick."""

    def fields(self) -> Mapping[str, Any]:
        """Return the current fields without those that are None or empty."""
        return {name: value for name, value in self.present().items() if value is not None and value != ""}


class JsonLogFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def __init__(self, worker: str = "", extras: Sequence[str] = (), context: LogContext | None = None) -> None:
        """`worker`: name of the process in its job; `extras`: attributes to show for records that have them."""
        super().__init__()
        self._worker = worker
        self._extras = tuple(extras)
        self._context = context or LogContext()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._context.fields(),
            **({"worker": self._worker} if self._worker else {"logger": record.name}),
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in self._extras if hasattr(record, name)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def job_key(metadata: Mapping[str, Any]) -> str:
    """Return namespace/name of a job, the `job` field of a line."""
    return f"{metadata.get('namespace') or NAMESPACE}/{metadata['name']}"


def log_what_is_printed() -> None:
    """Log warnings and uncaught exceptions, except Ctrl-C and SystemExit."""
    log = logging.getLogger("python")
    logging.captureWarnings(capture=True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("ended by %s: %s", kind.__name__, error, exc_info=(kind, error, trace))

    def uncaught_in_thread(hook_args: threading.ExceptHookArgs) -> None:
        if hook_args.exc_value is not None and not isinstance(hook_args.exc_value, SystemExit):
            name = hook_args.thread.name if hook_args.thread else "?"
            trace = (hook_args.exc_type, hook_args.exc_value, hook_args.exc_traceback)
            log.error(
                "thread %s ended by %s: %s", name, hook_args.exc_type.__name__, hook_args.exc_value, exc_info=trace
            )

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
