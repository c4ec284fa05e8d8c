"""Configures the operator's log on stderr: one JSON object per line, or plain lines.

Other code that logs about a job passes its key as `extra={"job": key}`.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from rlhf_common.json_logs import JsonLogFormatter, LogContext, log_what_is_printed

_EXTRAS: Final = ("job", "event")
_RECONCILED: Final[ContextVar[Mapping[str, Any]]] = ContextVar("reconciled", default={})  # noqa: B039 never changed
_CONTEXT: Final = LogContext()
_CONTEXT.present = _RECONCILED.get


def configure(*, json_lines: bool) -> None:
    """Send the root logger's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(json_formatter())
        log_what_is_printed()
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # kopf logs each of its steps; only its problems matter. The operator handles signals itself.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    handler.addFilter(_of_kopf)


def _of_kopf(record: logging.LogRecord) -> bool:
    """Return whether to log a line; remove the traceback of kopf's lines."""
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return not record.getMessage().startswith("OS signals are ignored")


def json_formatter() -> JsonLogFormatter:
    """Return the formatter of JSON lines."""
    return JsonLogFormatter(extras=_EXTRAS, context=_CONTEXT)


def present() -> Mapping[str, Any]:
    """Return the job fields of log lines in this task."""
    return _CONTEXT.fields()


@contextmanager
def reconciling(key: str, job: Mapping[str, Any] | None, trace_id: str = "") -> Iterator[None]:
    """Add the job, the iteration in its status and the trace, if any, to every JSON log line of this task."""
    token = _RECONCILED.set({"job": key, "iteration": _iteration(job), "trace_id": trace_id})
    try:
        yield
    finally:
        _RECONCILED.reset(token)


def _iteration(job: Mapping[str, Any] | None) -> int | None:
    """Return the iteration in a stored job, whose content is untrusted; None if it is no whole number."""
    status = (job or {}).get("status")
    progress = status.get("progress") if isinstance(status, dict) else None
    iteration = progress.get("iteration") if isinstance(progress, dict) else None
    return iteration if type(iteration) is int else None
