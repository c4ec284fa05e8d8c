"""Gradients of an iteration's chunks on one rank, before its optimizer step (`spec.training.stream`).

A chunk is some whole prompts of the batch. Its advantages and its loss come from its own samples; each loss is
multiplied by the chunk's count of tokens or responses, so that the sum over chunks lacks only a division by the count
of the whole batch. `finish` divides, and takes the step. The weights stay unchanged until then.
Rule: the sum depends on the chunks and on their order. A rank that dies loses it; its successor computes the same
chunks in the same order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.algorithms.base import Algorithm
from rlhf_workers.algorithms.objectives import Objective, Statistics
from rlhf_workers.training.batches.micro_batch_splitter import MicroBatchSplitter
from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.objective_metrics import Norms, Objectives
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout

NO_ITERATION: Final = -1
"""Number of the iteration of a stream without chunks."""


class AddsGradients(Protocol):
    """The part of a trainer that a stream needs."""

    spec: RLHFJobSpec
    layout: RankLayout
    algorithm: Algorithm
    splitter: MicroBatchSplitter
    optimizers: Mapping[tuple[str, int], StageOptimizer]
    step_seconds: list[float]

    def begin_iteration(self) -> None:
        """Reset the times and the hooks of an iteration."""

    def objectives(self) -> dict[str, Objective]:
        """Return trained role -> objective with empty statistics."""

    def add_gradients(
        self,
        batch: TrainingBatch,
        plan: MicroBatchPlan,
        objectives: Objectives,
        factor: float = 1.0,
        *,
        continued: bool = False,
    ) -> None:
        """Add the gradients of a plan's samples, each loss times `factor`. `continued`: they belong to the mini-batch
        of the plan before."""

    def take_step(self, iteration: int, objectives: Objectives, before: Mapping[str, Statistics]) -> dict[str, float]:
        """Take the optimizer step; return the norms by model, empty for a step that is not finite."""


class GradientStream:
    """The chunks of one iteration whose gradients a rank has."""

    def __init__(self) -> None:
        self._iteration, self._units = NO_ITERATION, 0
        self._chunks: list[tuple[int, ...]] = []
        self.objectives: dict[str, Objective] = {}
        """Objectives that have seen the chunks, by model."""

    def chunks(self, iteration: int) -> Sequence[tuple[int, ...]]:
        """Return the numbers of the samples of each chunk of an iteration, in the order of the sum."""
        return self._chunks if iteration == self._iteration else ()

    def add(self, trainer: AddsGradients, iteration: int, samples: tuple[int, ...], chunk: TrainingBatch) -> int:
        """Add the gradients of a chunk; return its micro-batches on this rank."""
        if iteration != self._iteration:
            self.drop(trainer.optimizers.values())
            trainer.begin_iteration()
            self._iteration, self.objectives = iteration, trainer.objectives()
            for objective in self.objectives.values():
                objective.first_pass = True
        trainer.algorithm.begin_iteration(iteration)
        chunk = trainer.algorithm.prepare(chunk)
        units = trainer.algorithm.loss_units(chunk.mask)
        microbatches = 0
        if units:  # otherwise it has no token to train on
            plan = trainer.splitter.split(_layout(trainer, len(samples)), list(range(len(samples))), chunk)
            trainer.add_gradients(chunk, plan, self.objectives, float(units), continued=True)
            microbatches = sum(plan.layout.microbatches(model) for model in self.objectives)
        self._units += units
        self._chunks.append(samples)
        return microbatches

    def finish(self, trainer: AddsGradients, norms: Norms) -> int:
        """Take the step of the iteration, and add each model's norm; return the skipped mini-batches: 1 if there was no
        token to train on, else 0."""
        iteration, objectives, units = self._iteration, self.objectives, self._units
        self._iteration = NO_ITERATION
        if not units:
            self.drop(trainer.optimizers.values())
            return 1
        for optimizer in trainer.optimizers.values():
            optimizer.gradients.mul_(1.0 / units)
        before = {model: empty.statistics for model, empty in trainer.objectives().items()}
        for objective in objectives.values():
            objective.statistics.scale_losses(1.0 / units)
        for model, norm in trainer.take_step(iteration, objectives, before).items():
            norms[model].append(norm)
        trainer.step_seconds = [sum(trainer.step_seconds)]
        self._forget()
        return 0

    def drop(self, optimizers: Iterable[StageOptimizer]) -> None:
        """Drop all chunks and their gradients."""
        if self._chunks or self._iteration != NO_ITERATION:
            for optimizer in optimizers:
                optimizer.gradients.zero_()
        self._forget()

    def _forget(self) -> None:
        self._iteration, self._units, self._chunks, self.objectives = NO_ITERATION, 0, [], {}


def _layout(trainer: AddsGradients, samples: int) -> RankLayout:
    """Return the rank's place with the micro-batches of a chunk of so many samples."""
    layout, size = trainer.layout, trainer.spec.algorithm.fields.mini_batch_size
    return layout.with_microbatches({model: layout.microbatches(model) * samples // size for model in layout.models})
