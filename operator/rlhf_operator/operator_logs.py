"""Log lines of the operator on stderr: one JSON object per line, or plain lines.

Rule: whoever speaks of a job puts its key into `extra={"job": key}`, so that lines are found by job.
"""

import logging
import sys
from typing import Final

from rlhf_api.json_logs import JsonLogFormatter

_EXTRAS: Final = ("job", "event")


def configure(*, json_lines: bool) -> None:
    """Send the root logger's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    line = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLogFormatter(extras=_EXTRAS) if json_lines else line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # kopf tells every step of its own; what it cannot do is all that matters. Signals are for us to take.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    handler.addFilter(lambda record: not record.getMessage().startswith("OS signals are ignored"))
