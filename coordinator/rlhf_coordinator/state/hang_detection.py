"""Learns the longest normal gap between progress reports of training ranks; the hang time-out follows from it.

Rule: pure; times are arguments, in seconds of the monotonic clock.
"""

from typing import Final

SLACK: Final = 10.0
"""Ratio of the limit to the longest confirmed gap."""
LEAST_SECONDS: Final = 60.0
"""Least limit in seconds, unless the manifest sets a smaller one."""


class HangDetector:
    """Hang detection of one job's training group."""

    def __init__(self) -> None:
        self._longest, self._present, self._last = 0.0, 0.0, 0.0
        self._known = False

    def moved(self, sent: float, now: float) -> None:
        """Record that a rank reported finished units of the Train that was sent to it at `sent`."""
        self._present = max(self._present, now - max(sent, self._last))
        self._last = now

    def trained(self, sent: float, now: float) -> None:
        """Record that a rank finished its Train, which confirms the gaps in it."""
        self.moved(sent, now)
        self._longest, self._present, self._known = max(self._longest, self._present), 0.0, True

    def limit(self, hang_seconds: float, most: float) -> float:
        """Return the seconds without a finished unit after which the group counts as hung, at most `most`.

        `hang_seconds` is spec.runPolicy.hangTimeoutSeconds. With 0, and before a rank finished a Train, the limit is
        `most`.
        """
        if not self._known or not hang_seconds:
            return most
        return min(most, max(SLACK * self._longest, min(LEAST_SECONDS, hang_seconds)))
