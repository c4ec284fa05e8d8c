"""Measured results of steps by batch size and budget, as a check on predictions from the learned costs.

They give the regret of a step, its time beyond that of the best recorded alternative. Rule: immutable.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BATCHES: Final = 13
"""Number of classes of batch sizes: 1, 2, 3-4, 5-8, ..., and above 2048 samples."""
BUDGETS: Final = (0, 1, 2, 4, 8, 16)
"""Classes of budgets: maximum drafted tokens per sample, on average; 0 is a plain step, and the last has no maximum."""
KEPT: Final = 0.97
"""Weight of earlier records after each step of a class: a window of about thirty."""
ENOUGH: Final = 8
"""Damped number of steps from which a class counts as an alternative."""
LARGEST: Final = 0.5
"""Maximum absolute log(measured / predicted) that one step may contribute."""
DOUBT: Final = 8.0
"""Steps that "predictions are right" counts for."""


def batch_class(rows: int) -> int:
    """Return the class of a batch of `rows` samples, at least 1."""
    return min((rows - 1).bit_length(), BATCHES - 1)


def budget_class(slots: int, rows: int) -> int:
    """Return the class of `slots` drafted tokens for `rows` samples."""
    return min(bisect_left(BUDGETS, slots / max(rows, 1)), len(BUDGETS) - 1)


@dataclass(frozen=True)
class StepRecords:
    """Damped sums by class of batch and budget, and of log(measured rate / predicted rate) by batch and asking."""

    tokens: Floats
    seconds: Floats
    steps: Floats
    """float64 [BATCHES, BUDGETS] number of steps; the two sums above have the same shape."""
    error: Floats
    error_steps: Floats
    """float64 [BATCHES, 2] number of steps without and with asking drafters; the sum above has the same shape."""

    @classmethod
    def empty(cls) -> "StepRecords":
        """Return empty records."""
        cells, asked = (BATCHES, len(BUDGETS)), (BATCHES, 2)
        return cls(np.zeros(cells), np.zeros(cells), np.zeros(cells), np.zeros(asked), np.zeros(asked))

    def observed(
        self, rows: int, slots: int, tokens: int, seconds: float, *, asked: bool, predicted: float
    ) -> "StepRecords":
        """Return the records with a step; `predicted` is its expected tokens per second, 0 without a prediction."""
        batch, cell = batch_class(rows), (batch_class(rows), budget_class(slots, rows))
        sums = self.tokens.copy(), self.seconds.copy(), self.steps.copy()
        for total, value in zip(sums, (float(tokens), seconds, 1.0), strict=True):
            total[cell] = total[cell] * KEPT + value
        # Both kinds are damped. Otherwise an old error would persist as long as it prevents that kind from being
        # chosen.
        error, error_steps = self.error.copy(), self.error_steps.copy()
        error[batch] *= KEPT
        error_steps[batch] *= KEPT
        if predicted > 0:
            error[batch, int(asked)] += min(max(math.log(tokens / seconds / predicted), -LARGEST), LARGEST)
            error_steps[batch, int(asked)] += 1.0
        return StepRecords(*sums, error, error_steps)

    def regret(self, rows: int, tokens: int, seconds: float) -> float:
        """Return the seconds by which a step took longer than the best recorded class would for as many tokens; 0
        without one."""
        batch = batch_class(rows)
        recorded = self.steps[batch] >= min(ENOUGH, 1.0 / (1.0 - KEPT))
        if not recorded.any():
            return 0.0
        best = float((self.tokens[batch][recorded] / self.seconds[batch][recorded]).max())
        return max(0.0, seconds - tokens / best)

    def correction(self, rows: int) -> float:
        """Return the factor that corrects the predicted rate of steps with drafts relative to plain ones."""
        batch = batch_class(rows)
        plain, asked = self.error[batch] / (self.error_steps[batch] + DOUBT)
        return float(np.exp(asked - plain))
