"""Writes vLLM's log lines to the worker's log, bounded, and shows them as the worker's stage while the engine builds.

Rule: vLLM's warnings are written at any time, other lines while the engine is built.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rlhf_workers.progress import WorkStage, stage

LINES_PER_MINUTE: Final = 120
"""Maximum lines of vLLM in each period of one minute."""
MAX_CHARACTERS: Final = 2000
"""Maximum characters of a message; a longer one is cut and gets a note of its length."""
_MINUTE: Final = 60.0


class BoundedLines(logging.Filter):
    """Limits the number and length of vLLM's lines; passes all other lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since, self._lines = clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; shorten a long line of vLLM."""
        if record.name.partition(".")[0] != "vllm":
            return True
        now = self._clock()
        if now - self._since >= _MINUTE:
            dropped, self._since, self._lines = self._lines - LINES_PER_MINUTE, now, 0
            if dropped > 0:
                _set(record, f"({dropped} lines of vLLM were dropped before this one) {record.getMessage()}")
        self._lines += 1
        text = record.getMessage()
        if len(text) > MAX_CHARACTERS:
            _set(record, text[:MAX_CHARACTERS] + f"... ({len(text)} characters)")
        return self._lines <= LINES_PER_MINUTE


class _SaysStage(logging.Handler):
    def __init__(self, said: WorkStage) -> None:
        super().__init__(logging.INFO)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.says(f"in vLLM: {record.getMessage().splitlines()[0] if record.getMessage() else ''}")


@contextmanager
def reported_build() -> Iterator[None]:
    """Log vLLM's lines inside from level INFO on, and show the last one as the worker's stage."""
    logger = logging.getLogger("vllm")
    # If vLLM was imported before its environment was set, its logger has its own handler and does not propagate.
    logger.handlers.clear()
    logger.propagate = True
    for handler in logging.getLogger().handlers:
        if not any(isinstance(log_filter, BoundedLines) for log_filter in handler.filters):
            handler.addFilter(BoundedLines())
    with stage("building the vLLM engine") as said:
        speaking, level = _SaysStage(said), logger.level
        logger.addHandler(speaking)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(speaking)
            logger.setLevel(level)


def _set(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = text, None
