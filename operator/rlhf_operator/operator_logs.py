"""Log lines of the operator on stderr: one JSON object a line, or plain lines.

Rule: whoever speaks of a job puts its key into `extra={"job": key}`, so that lines are found by job.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

_EXTRAS: Final = ("job", "event")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(*, json_lines: bool) -> None:
    """Root logger to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    line = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if json_lines else line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # kopf tells every step of its own; what it cannot do is all that matters. Signals are for us to take.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    handler.addFilter(lambda record: not record.getMessage().startswith("OS signals are ignored"))
