"""Progress of a job's training: its optimizer steps, and those without the policy.

All models have the same schedule of steps, except during the warm-up of critics. Must never depend on state that
`checkpoint` does not save in trainer.json, or a replay would train other bits.
"""

from dataclasses import dataclass, field

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.training.optimizers.nonfinite import NonFiniteSteps
from rlhf_workers.training.optimizers.optimizer import Horizon


def steps_of(spec: RLHFJobSpec, iterations: int) -> int:
    """Return the number of optimizer steps of `iterations` iterations, if none is skipped."""
    fields = spec.algorithm.fields
    return iterations * fields.epochs * (spec.rollout.batch_size // fields.mini_batch_size)


@dataclass
class TrainingProgress:
    """State besides weights, moments and the algorithm's own; saved in trainer.json."""

    steps: int
    """Optimizer steps so far, without skipped ones: the position in the schedule. While critics train behind the
    policy, it counts theirs.
    """
    horizon: Horizon
    non_finite: NonFiniteSteps = field(default_factory=NonFiniteSteps)
    held_steps: int = 0
    """Number of steps that trained only critics."""

    def look_ahead(self, total: int, warmup: int) -> None:
        """Plan the learning rate from now on; `total`: optimizer steps of the whole job."""
        if total != self.horizon.total:
            self.horizon = self.horizon.changed(total, self.steps, warmup)
