"""Log lines of the coordinator on stderr: `time level coordinator message`, or one JSON object a line.

Rule: the last line of a process that ends with an error says why; the format is that of the workers.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from rlhf_api.names import Env

NAME = "coordinator"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "worker": NAME,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        if (report := getattr(record, "report", None)) is not None:
            entry["report"] = report
        return json.dumps(entry, ensure_ascii=False)


def configure_logs() -> None:
    """Root logger to stderr in the format that RLHF_LOG_FORMAT asks for."""
    line = logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {NAME} %(message)s", "%Y-%m-%dT%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if os.environ.get(Env.LOG_FORMAT) == "json" else line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # transformers says that it found no torch, which is how it is meant.
    logging.getLogger("transformers").setLevel(logging.ERROR)
