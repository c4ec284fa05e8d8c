"""Log lines of a worker on stderr: `time level worker message`, or one JSON object a line.

Rule: the last line of a process that ends with an error says why. Must never buffer: `os._exit` may follow any line.
"""

import json
import logging
import sys
from datetime import UTC, datetime


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logs(worker: str, *, json_lines: bool) -> None:
    """Root logger to stderr in the format of the job."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {worker} %(message)s"
    handler.setFormatter(_JsonFormatter(worker) if json_lines else logging.Formatter(line, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def flush_logs() -> None:
    """What stands between the last line and `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
