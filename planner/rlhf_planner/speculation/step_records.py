"""What steps gave at each batch size and budget, as they were measured: the check on what the learned costs predict.

Rule: sums of tokens and seconds, damped, so that every rate is one that was seen. From them follow the regret of a
step, which is what it took beyond the best alternative on record, and how far predictions of steps with and without
drafts are off, by which the choice between the two is corrected. Pure and immutable.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BATCHES: Final = 13
"""Classes of batch sizes: 1, 2, 3-4, 5-8, ... up to 4096 samples."""
BUDGETS: Final = (0, 1, 2, 4, 8, 16)
"""Classes of budgets: most drafted tokens a sample, on average; 0 is a plain step."""
KEPT: Final = 0.97
"""Weight of what was recorded, by each step of a class: a window of some thirty."""
ENOUGH: Final = 8
"""Steps after which a class is an alternative."""
LARGEST: Final = 0.5
"""Of the logarithm of measured / predicted that is believed of one step."""
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
    """float64 [BATCHES, BUDGETS], as the two above."""
    error: Floats
    error_steps: Floats
    """float64 [BATCHES, 2], as the one above: steps without and with asking drafters."""

    @classmethod
    def empty(cls) -> "StepRecords":
        """Return records of nothing."""
        cells, asked = (BATCHES, len(BUDGETS)), (BATCHES, 2)
        return cls(np.zeros(cells), np.zeros(cells), np.zeros(cells), np.zeros(asked), np.zeros(asked))

    def observed(
        self, rows: int, slots: int, tokens: int, seconds: float, *, asked: bool, predicted: float
    ) -> "StepRecords":
        """Return the records with a step; `predicted` tokens a second were expected of it, 0: nothing was."""
        batch, cell = batch_class(rows), (batch_class(rows), budget_class(slots, rows))
        sums = self.tokens.copy(), self.seconds.copy(), self.steps.copy()
        for total, value in zip(sums, (float(tokens), seconds, 1.0), strict=True):
            total[cell] = total[cell] * KEPT + value
        # Of both kinds, or what was wrong once would hold for as long as it keeps that kind from being chosen.
        error, error_steps = self.error.copy(), self.error_steps.copy()
        error[batch] *= KEPT
        error_steps[batch] *= KEPT
        if predicted > 0:
            error[batch, int(asked)] += min(max(math.log(tokens / seconds / predicted), -LARGEST), LARGEST)
            error_steps[batch, int(asked)] += 1.0
        return StepRecords(*sums, error, error_steps)

    def regret(self, rows: int, tokens: int, seconds: float) -> float:
        """Return by how many seconds a step took longer than the best class on record takes for as many tokens."""
        batch = batch_class(rows)
        known = self.steps[batch] >= min(ENOUGH, 1.0 / (1.0 - KEPT))
        if not known.any():
            return 0.0
        best = float((self.tokens[batch][known] / self.seconds[batch][known]).max())
        return max(0.0, seconds - tokens / best)

    def correction(self, rows: int) -> float:
        """Return what the predicted rate of steps with drafts, beside that of plain ones, is to be multiplied with."""
        batch = batch_class(rows)
        plain, asked = self.error[batch] / (self.error_steps[batch] + DOUBT)
        return float(np.exp(asked - plain))
