"""The decode failures of one sample: which worker failed, how often, and what follows for the sample.

A worker can say that it failed on one sample and goes on with the others: then that sample is the cause. Or a worker
ends (an error of its engine, a crash, a hang): then every sample that it held may be the cause, or none. Those go
elsewhere beside others, as most ends of workers have nothing to do with samples. One that was there as often as it may
be tried again is decoded alone, once no others are queued: the next end of its worker is its own. Tokens are a function
of the sample, so what it does to an engine it does at one place: one that gets past that is cleared.
Rule: pure values. A sample has failed when its tries are used up and the last one had it alone. Sharing a worker with a
bad sample never fails a sample. (A loss from outside while a suspect is alone is taken for its own, which takes three
ends of workers in the same few tokens of one sample.) Counted in memory, for one iteration: a coordinator that restarts
begins anew, and what fails reliably fails again.
"""

from dataclasses import dataclass
from typing import Final

CLEARED_TOKENS: Final = 128
"""Tokens past the last known one of a failed try: more than an engine decodes of a sample between two reports."""


@dataclass(frozen=True, slots=True)
class DecodeFailures:
    """What was held against one sample so far."""

    count: int = 0
    """Ends of workers, or of its decoding, while it was there."""
    proven: bool = False
    """Of the last one it was the cause: the worker said so, or it held nothing else."""
    unproven: int = 0
    """Those that may have had another cause."""
    worker: str = ""
    """Where the last one was; the next try is elsewhere if it can be."""
    why: str = ""
    """The last one in words."""
    tokens: int = 0
    """Tokens of its response that were known at the last one."""

    def and_another(self, worker: str, why: str, tokens: int, *, proven: bool) -> "DecodeFailures":
        """Return these faults and one more, at which so many tokens were known."""
        return DecodeFailures(self.count + 1, proven, self.unproven + (not proven), worker, why, tokens)

    def after(self, tokens: int) -> "DecodeFailures":
        """Return what is still held against a sample of which so many tokens are known."""
        return NO_FAULTS if self.count and tokens >= self.tokens + CLEARED_TOKENS else self

    def isolates(self, retries: int) -> bool:
        """Return whether the sample is to be decoded alone, so that its next fault proves something."""
        return self.unproven > 0 and self.count >= max(1, retries)

    def is_final(self, retries: int) -> bool:
        """Return whether the sample has failed: it was tried `retries` times again, and it was the cause."""
        return self.proven and self.count > retries


NO_FAULTS: Final = DecodeFailures()
