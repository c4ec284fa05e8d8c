"""Learns the longest normal gap between progress reports of training ranks; the hang time-out follows from it.

A piece is what ranks count in heartbeats: an action on one micro-batch of one stage, or a
part of an optimizer step. Ranks wait for each other, so the time that is looked at is the one in which none of them
finished any. Rule: pure; times come in, as seconds of the monotonic clock. Nothing is believed before a whole Train was
seen, as no limit can be named for a model of which nothing is known. Must never decide what follows for a worker:
that is `waits`. When the process dies this is lost, and learned again in one iteration.
"""

from typing import Final

SLACK: Final = 10.0
"""Times the longest calm so far: a micro-batch of far longer responses, or a machine that is suddenly shared."""
LEAST_SECONDS: Final = 60.0
"""Calms this short end by themselves, as a file server that comes back does; what a hang costs is small against it."""


class HangDetector:
    """Of the training group of one job."""

    def __init__(self) -> None:
        self._longest, self._present, self._last = 0.0, 0.0, 0.0
        self._known = False

    def moved(self, sent: float, now: float) -> None:
        """Take in that a rank finished a piece of the Train that was sent to it at `sent`."""
        self._present = max(self._present, now - max(sent, self._last))
        self._last = now

    def trained(self, sent: float, now: float) -> None:
        """Take in that a rank finished its Train: what was seen in it is believed."""
        self.moved(sent, now)
        self._longest, self._present, self._known = max(self._longest, self._present), 0.0, True

    def limit(self, hang_seconds: float, most: float) -> float:
        """Return the seconds without a piece after which the group hangs, at most `most`.

        `hang_seconds`: spec.runPolicy.hangTimeoutSeconds, the least such time where that is below `LEAST_SECONDS`;
        0: nothing is learned from.
        """
        if not self._known or not hang_seconds:
            return most
        return min(most, max(SLACK * self._longest, min(LEAST_SECONDS, hang_seconds)))
