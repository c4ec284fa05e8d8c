"""How far the training of a job is: its optimizer steps, and those in which the policy was held.

All models go through the same steps, but for the warm-up of critics, in whose steps the policy takes no part: its
moments, and the rise of its learning rate, begin with its own first step. Must never depend on anything but what
`checkpoint` saves of it in trainer.json, or a replay would train other bits.
"""

from dataclasses import dataclass, field

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.training.optimizers.nonfinite import NonFiniteSteps
from rlhf_workers.training.optimizers.optimizer import Horizon


def steps_of(spec: RLHFJobSpec, iterations: int) -> int:
    """Return the optimizer steps of so many iterations."""
    fields = spec.algorithm.fields
    return iterations * fields.epochs * (spec.rollout.batch_size // fields.mini_batch_size)


@dataclass
class TrainingProgress:
    """State beyond weights, moments and the algorithm's own; saved in trainer.json."""

    steps: int
    """Optimizer steps so far; the position in the learning-rate schedule."""
    horizon: Horizon
    non_finite: NonFiniteSteps = field(default_factory=NonFiniteSteps)
    held_steps: int = 0
    """Of these, steps of critics alone."""

    def look_ahead(self, total: int, warmup: int) -> None:
        """Plan the learning rate for a job that has `total` steps from now on."""
        if total != self.horizon.total:
            self.horizon = self.horizon.changed(total, self.steps, warmup)
