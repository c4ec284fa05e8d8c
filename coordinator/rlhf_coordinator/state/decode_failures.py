"""The decode failures of one sample: the failed worker, the number of failures, and the consequence for the sample.

A worker can report that it failed on one sample and continues with the others: then that sample is the cause. If a
worker ends (an error of its engine, a crash, a hang), every sample on it may be the cause, or none. These samples go to
other workers and decode beside others, because most ends of workers have nothing to do with samples. A sample that uses
up its retries in this way is decoded alone, once no others are queued: the next end of its worker is then its own
failure. Tokens are a function of the sample, so it should break an engine at about the same position; a sample that
passes it is cleared.
Rule: pure values. A sample has failed when its retries are used up and it caused the last failure. Sharing a worker
with a bad sample does not fail a sample. (A worker lost for another reason while a suspect is alone counts as the
suspect's failure.) Failures are counted in memory, for one iteration: a restarted coordinator counts again, and
reproducible failures recur.
"""

from dataclasses import dataclass
from typing import Final

CLEARED_TOKENS: Final = 128
"""Tokens beyond a failure's last known position after which a sample is cleared."""


@dataclass(frozen=True, slots=True)
class DecodeFailures:
    """The failures counted against one sample so far."""

    count: int = 0
    """Number of ends of workers, or of its decoding, while it was there."""
    proven: bool = False
    """Whether it caused the last failure: the worker said so, or had no other sample."""
    unproven: int = 0
    """Number of failures that may have had another cause."""
    worker: str = ""
    """Worker of the last failure; the next attempt is elsewhere if possible."""
    why: str = ""
    """Description of the last failure."""
    tokens: int = 0
    """Number of known tokens of its response at the last failure."""

    def and_another(self, worker: str, why: str, tokens: int, *, proven: bool) -> "DecodeFailures":
        """Return these failures and another one, at which `tokens` tokens were known."""
        return DecodeFailures(self.count + 1, proven, self.unproven + (not proven), worker, why, tokens)

    def after(self, tokens: int) -> "DecodeFailures":
        """Return the failures that still count against a sample with `tokens` known tokens."""
        return NO_FAULTS if self.count and tokens >= self.tokens + CLEARED_TOKENS else self

    def isolates(self, retries: int) -> bool:
        """Return whether the sample must be decoded alone, so that its next failure is conclusive."""
        return self.unproven > 0 and self.count >= max(1, retries)

    def is_final(self, retries: int) -> bool:
        """Return whether the sample has failed: it was retried `retries` times, and it was the cause."""
        return self.proven and self.count > retries


NO_FAULTS: Final = DecodeFailures()
