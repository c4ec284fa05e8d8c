"""Shows the progress of a scenario on a terminal (position, rate, remaining time); elsewhere prints a line now and
then."""

from __future__ import annotations

import sys
import time

EVERY_SECONDS = 10.0
"""Minimum seconds between two lines before the last if the output is no terminal."""


class Progress:
    """Progress on standard error, so that standard output contains only results."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total = description, total
        self._begun = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def at(self, done: int) -> None:
        """Show that `done` of the total are done."""
        now = time.monotonic()
        if not self._terminal and now - self._shown < EVERY_SECONDS and done < self._total:
            return
        self._shown = now
        rate = done / max(now - self._begun, 1e-9)
        left = f"{(self._total - done) / rate:.0f} s left" if rate > 0 else "waiting"
        text = f"{self._description}: {done}/{self._total}, {rate:.0f}/s, {left}"
        end = "\n" if done >= self._total or not self._terminal else ""
        print(("\r\x1b[K" if self._terminal else "") + text, end=end, file=sys.stderr, flush=True)
