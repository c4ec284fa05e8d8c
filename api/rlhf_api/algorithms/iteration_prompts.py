"""Which prompts each iteration begins, and how many prompts wait for a later one.

With `spec.rollout.oversample` an iteration has more prompts than a batch, except for long rounds. The surplus prompts
are dropped, carried into the next iteration (`maxStaleness`), or deferred to a long round (`longRounds`).

With long rounds, batch B and surplus M, of the first n iterations floor(M n / (B + M)) are long. A short round begins B
+ M prompts and defers M. A long round takes the B prompts that waited longest and begins none.

Rule: pure arithmetic.
"""

from dataclasses import dataclass
from typing import Literal

Surplus = Literal["Dropped", "Carried", "Deferred"]
"""Fate of prompts that are cut off."""


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """The prompts of each iteration of a job. All numbers count prompts."""

    batch: int
    """Prompts of a batch."""
    extra: int = 0
    """Prompts of an iteration beyond those of its batch, unless it is a long round."""
    surplus: Surplus = "Dropped"

    @property
    def most(self) -> int:
        """Most prompts of an iteration."""
        return self.batch + self.extra

    @property
    def longest_wait(self) -> int:
        """Iterations within which a deferred prompt is taken up: the long rounds that empty the queue, times the
        iterations from one long round to the next, both rounded up. 0 if none are deferred."""
        if self.surplus != "Deferred" or not self.extra:
            return 0
        return -(-self.most // self.batch) * -(-self.most // self.extra)

    def is_long(self, iteration: int) -> bool:
        """Return whether an iteration is a long round."""
        return self._long_before(iteration + 1) > self._long_before(iteration)

    def size(self, iteration: int) -> int:
        """Return the number of prompts of an iteration, with those that it takes up."""
        return self.batch if self.is_long(iteration) else self.most

    def first(self, iteration: int) -> int:
        """Return the number of the first prompt of an iteration, counted over all passes through the prompt file.

        Prompts that it takes up have earlier numbers. For a long round it is the first number of the next short round.
        """
        if self.surplus == "Carried":
            return iteration * self.batch
        return (iteration - self._long_before(iteration)) * self.most

    def end(self, iteration: int) -> int:
        """Return how many prompts are begun by the end of an iteration, counted like `first`."""
        return self.first(iteration) + (0 if self.is_long(iteration) else self.most)

    def waiting(self, iteration: int) -> int:
        """Return how many deferred prompts wait when an iteration begins; 0 if none are deferred."""
        if self.surplus != "Deferred":
            return 0
        return iteration * self.extra - self._long_before(iteration) * self.most

    def _long_before(self, iteration: int) -> int:
        return self.extra * iteration // self.most if self.surplus == "Deferred" else 0
