"""The order of models in an iteration's training: all together, or the policy before its critics.

Rule: both orders take the same optimizer steps on the same mini-batches. One exception is a critic's number that is not
finite: with the policy first, only the critics skip that step. The policy's weights are final once `critics_behind` is
set.
"""

from collections.abc import Generator
from typing import Protocol

from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.objective_metrics import Norms, Objectives
from rlhf_workers.training.training_progress import TrainingProgress


class TrainsModels(Protocol):
    """The part of a trainer that an order needs."""

    progress: TrainingProgress
    step_seconds: list[float]
    critics_behind: bool

    def train_models(
        self, iteration: int, batch: TrainingBatch, objectives: Objectives, norms: Norms, left_out: set[int]
    ) -> Generator[None, None, int]:
        """Train some models on every mini-batch; return the number of mini-batches without a token to train on."""


def train_policy_first(
    trainer: TrainsModels,
    policy: str,
    iteration: int,
    batch: TrainingBatch,
    objectives: Objectives,
    norms: Norms,
) -> Generator[None, None, int]:
    """Train the policy on all mini-batches, then the other models on the same, from the same optimizer step on."""
    start, left_out = trainer.progress.steps, set[int]()
    skipped = yield from trainer.train_models(iteration, batch, {policy: objectives[policy]}, norms, left_out)
    end, of_policy = trainer.progress.steps, trainer.step_seconds
    trainer.progress.steps, trainer.step_seconds, trainer.critics_behind = start, [], True
    yield
    critics = {model: objective for model, objective in objectives.items() if model != policy}
    yield from trainer.train_models(iteration, batch, critics, norms, left_out)
    trainer.step_seconds = [sum(seconds) for seconds in zip(of_policy, trainer.step_seconds, strict=True)]
    trainer.progress.steps = end
    return skipped
