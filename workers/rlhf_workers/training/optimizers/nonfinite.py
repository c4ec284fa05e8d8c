"""Steps with an infinite or NaN loss or gradient: skipped and counted; too many in a row end the job.

Rule: the decision depends on sums over all ranks, so every pipeline stage and replica makes the same one. A skipped
step does not change weights or moments.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_workers.failures import WorkError

FIELD: Final = "spec.training.optimizer.maxNonFiniteSteps"


@dataclass
class NonFiniteSteps:
    """Counts of skipped steps; saved in trainer.json."""

    total: int = 0
    in_a_row: int = 0

    def problem(
        self,
        losses: Mapping[str, float],
        squares: Mapping[tuple[str, int], float],
        iteration: int,
        step: int,
        limit: int,
    ) -> str:
        """Return why optimizer step `step` must be skipped; empty if it may be taken.

        `losses`: model -> loss, `squares`: (model, stage) -> squared gradient norm. Raises WorkError after more than
        `limit` skipped steps in a row.
        """
        result = _named(losses, squares)
        if not result:
            self.in_a_row = 0
            return ""
        self.total += 1
        self.in_a_row += 1
        message = f"iteration {iteration}: {', '.join(result)} at optimizer step {step}"
        if self.in_a_row > limit:
            row = f", as it was {limit} times in a row before" if limit else ""
            raise WorkError(
                "GradientNotFinite",
                f"{message}{row}; weights were not changed. Lower spec.training.optimizer.learningRate, or look for "
                f"numbers that overflow in the model or the rewards ({FIELD} is {limit})",
                field="spec.training.optimizer.learningRate",
            )
        return f"{message}: the step is skipped ({self.in_a_row} in a row; more than {limit} fail the job)"

    def metrics(self, before: int) -> dict[str, float]:
        """Return the metrics of an iteration that started with `before` skipped steps."""
        return {"train/nonfinite_steps": float(self.total - before), "train/nonfinite_steps_total": float(self.total)}


def _named(losses: Mapping[str, float], squares: Mapping[tuple[str, int], float]) -> list[str]:
    """Return descriptions of non-finite values, such as `the gradient of the actor is nan (pipeline stages 0, 1)`."""
    texts = []
    for model, loss in losses.items():
        if not math.isfinite(loss):
            texts.append(f"the loss of the {model} is {loss}")
        bad = {
            stage: square for (name, stage), square in squares.items() if name == model and not math.isfinite(square)
        }
        if bad:
            places = f"pipeline stage{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
            texts.append(f"the gradient of the {model} is {sum(bad.values())} ({places})")
    return texts
