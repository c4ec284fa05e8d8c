"""Log lines of a worker on stderr: `time level worker message`, or one JSON object per line.

Rule: the last line of a process that ends with an error says why. Must never buffer: `os._exit` may follow any line.
"""

import logging
import sys

from rlhf_api.json_logs import JsonLogFormatter


def configure_logs(worker: str, *, json_lines: bool) -> None:
    """Root logger to stderr in the format of the job."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {worker} %(message)s"
    handler.setFormatter(JsonLogFormatter(worker) if json_lines else logging.Formatter(line, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def flush_logs() -> None:
    """What stands between the last line and `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
