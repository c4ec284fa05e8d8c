"""The decode failures of one sample: whether they isolate it, and whether they are final. Rule: pure values.

A failure is proven if a worker reports it about this sample, or ends while it has no other sample.
"""

from dataclasses import dataclass
from typing import Final

CLEARED_TOKENS: Final = 128
"""Tokens beyond those known at its last failure after which a sample is cleared."""


@dataclass(frozen=True, slots=True)
class DecodeFailures:
    """The failures counted against one sample since it was last cleared."""

    count: int = 0
    """Number of counted failures: ends of its workers, and reports that its decoding failed."""
    proven: bool = False
    """Whether it counts as the cause of the last failure: the worker said so, or had no other sample."""
    unproven: int = 0
    """Number of failures that may have had another cause."""
    worker: str = ""
    """Worker of the last failure."""
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
        """Return whether the sample must be decoded alone: it failed `retries` times, at least once, and a failure is
        unproven."""
        return self.unproven > 0 and self.count >= max(1, retries)

    def is_final(self, retries: int) -> bool:
        """Return whether the sample has failed: it was retried `retries` times, and it was the cause."""
        return self.proven and self.count > retries


NO_FAULTS: Final = DecodeFailures()
