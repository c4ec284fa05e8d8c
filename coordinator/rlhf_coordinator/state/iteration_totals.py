"""The number of iterations of the job, as of each iteration.

Rule: append-only.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class IterationTotals:
    """`since` contains (iteration, number of iterations of the job from that one on), in order."""

    since: tuple[tuple[int, int], ...] = ()

    def iterations_at(self, iteration: int) -> int:
        """Return the number of iterations of the job when `iteration` was trained; 0 if unknown."""
        return next((total for first, total in reversed(self.since) if first <= iteration), 0)

    def now(self, iterations: int, begun: int) -> "IterationTotals":
        """Return the totals of a job that now has `iterations`.

        `begun` is the last iteration that may have been trained with another number.
        """
        if self.since and self.since[-1][1] == iterations:
            return self
        return IterationTotals((*self.since, (begun + 1 if self.since else 0, iterations)))


def read_iteration_totals(stored: Sequence[Sequence[int]]) -> IterationTotals:
    """Return the stored totals."""
    return IterationTotals(tuple((int(first), int(total)) for first, total in stored))
