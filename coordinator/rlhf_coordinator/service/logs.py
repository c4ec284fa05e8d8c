"""Log lines of the coordinator on stderr: `time level coordinator message`, or one JSON object per line.

Rule: the last line of a process that ends with an error says why; the format is that of the workers.
"""

import logging
import os
import sys

from rlhf_api.json_logs import JsonLogFormatter
from rlhf_api.names import Env

NAME = "coordinator"


def configure_logs() -> None:
    """Send the root logger to stderr in the format that RLHF_LOG_FORMAT asks for."""
    line = logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {NAME} %(message)s", "%Y-%m-%dT%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLogFormatter(NAME, extras=("report",)) if os.environ.get(Env.LOG_FORMAT) == "json" else line
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # transformers says that it found no torch, which is how it is meant.
    logging.getLogger("transformers").setLevel(logging.ERROR)
