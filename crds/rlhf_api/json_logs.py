"""Log lines as JSON objects, the same in every process of the project: one object per line, on one schema.

Rule: a line has `time` (UTC, milliseconds), `level`, `message`, and `worker` in a process of a job or else `logger`;
what a process adds to single lines comes by `extra` of the logging call.
"""

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


class JsonLogFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def __init__(self, worker: str = "", extras: Sequence[str] = ()) -> None:
        """`worker`: name of the process in its job; `extras`: attributes of a record that are shown when it has
        them."""
        super().__init__()
        self._worker = worker
        self._extras = tuple(extras)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **({"worker": self._worker} if self._worker else {"logger": record.name}),
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in self._extras if hasattr(record, name)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
