"""One training iteration on one rank: advantages, epochs, mini-batches; each mini-batch is one execution of the table.

Rule: what is computed depends on (batch, seed, iteration, weights, table) alone, so a replay gives the same weights,
and pipelines, replicas and micro-batches change a gradient by nothing but the order of float32 sums: every token's
weight in the loss comes from the whole mini-batch. All ranks take every decision from the same numbers. A process
that dies here loses only this rank's memory: the group restarts from its last checkpoint and replays journaled
batches.
"""

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.schedule import ScheduleTable
from rlhf_workers.algorithms.objectives import MISMATCH_WARNING, Objective, Statistics
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.communicator import Communicator
from rlhf_workers.training.executor import TimedAction, execute
from rlhf_workers.training.minibatches import epoch_order, mini_batches, split
from rlhf_workers.training.model_stages import EMBEDDING, ModelStage
from rlhf_workers.training.nonfinite import NonFiniteSteps
from rlhf_workers.training.optimizer import Horizon, StageOptimizer, learning_rate
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.stage_copy import StageCopy
from rlhf_workers.training.stage_work import StageWork
from rlhf_workers.training.training_batch import MicroBatch, TrainingBatch, micro_batch

log = logging.getLogger(__name__)

NAMES: Final = {"F": "F", "B": "B", "I": "I", "W": "W", "RECV_F": "wait-F", "RECV_B": "wait-B"}
"""Action kind -> last part of its span's name."""


@dataclass
class TrainingProgress:
    """State beyond weights, moments and the algorithm's own; saved in trainer.json."""

    steps: int
    """Optimizer steps so far; the position in the learning-rate schedule."""
    horizon: Horizon
    non_finite: NonFiniteSteps = field(default_factory=NonFiniteSteps)


class Trainer:
    """Holds this rank's stages and optimizers."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        layout: RankLayout,
        stages: Mapping[tuple[str, int], ModelStage],
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        span: SpanSink,
    ) -> None:
        """`stages` are those of `layout.held`. WorkError when the mini-batch does not divide."""
        self.spec, self.layout, self.stages, self.communicator = spec, layout, stages, communicator
        self.device, self.compute, self._span = device, compute, span
        self.algorithm = build_algorithm(spec, device)
        self.progress = TrainingProgress(0, Horizon(self._steps_of(spec.iterations)))
        fields = spec.training.optimizer
        self.peaks = {model: fields.peak_learning_rate(ModelRole(model)) for model in layout.models}
        self.optimizers = {key: StageOptimizer(stage, fields, self.peaks[key[0]]) for key, stage in stages.items()}
        self._copies = [StageCopy(stage, self.optimizers[key], device) for key, stage in stages.items()]
        for stage in stages.values():
            stage.recompute = spec.training.activation_checkpointing
        self._everyone = tuple(range(layout.world))
        self.step_seconds: list[float] = []
        """Of every mini-batch of the last iteration: from its first action on this rank to its last."""
        self.bubble_seconds = 0.0
        """Of the last iteration: in mini-batches, but in no computation."""
        self._rates: dict[str, float] = {}
        """Of the last optimizer step, by model."""
        self._slots = [(model, stage) for model in layout.models for stage in range(layout.stages(model))]
        _check_sizes(spec, layout)

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int = 0
    ) -> Generator[None, None, dict[str, float]]:
        """Train one iteration, one mini-batch per step of the iterator, and return its metrics (`yield from`).

        `iterations`: of the job as of this one; 0: as the manifest has it.
        """
        state, steps = self.algorithm.state(), self.progress.steps
        try:
            return (yield from self._train(iteration, batch, iterations))
        except Exception:
            if self.progress.steps == steps:  # the weights are as they were: so is what the algorithm remembers
                self.algorithm.restore(state)
            raise

    def _train(self, iteration: int, batch: TrainingBatch, iterations: int) -> Generator[None, None, dict[str, float]]:
        self.step_seconds, self.bubble_seconds = [], 0.0
        self._look_ahead(self._steps_of(iterations or self.spec.iterations))
        with self._measured("train/advantages"):
            batch = self.algorithm.prepare(batch)
            objectives = self.objectives()
        norms: dict[str, list[float]] = {model: [] for model in self.layout.models}
        skipped, steps, non_finite = 0, self.progress.steps, self.progress.non_finite.total
        for epoch in range(self.spec.algorithm.fields.epochs):
            order = epoch_order(self.spec.seed, iteration, epoch, len(batch.prompts))
            for rows in mini_batches(order, self.spec.algorithm.fields.mini_batch_size):
                if not batch.mask[rows].any():  # every sample abstained: no gradient, so no step either
                    skipped += 1
                    continue
                for objective in objectives.values():
                    objective.first_pass = self.progress.steps == steps
                for model, norm in self._step(iteration, batch, rows, objectives).items():
                    norms[model].append(norm)
                yield
        metrics = self._metrics(batch, objectives, norms)
        metrics["train/skipped_steps"] = float(skipped)
        metrics["train/nonfinite_steps"] = float(self.progress.non_finite.total - non_finite)
        metrics["train/nonfinite_steps_total"] = float(self.progress.non_finite.total)
        self.algorithm.finish_iteration(metrics)
        return metrics

    def offload(self) -> None:
        """Move weights and moments to host memory and free the gradients, which are all zero between two trainings."""
        for optimizer in self.optimizers.values():
            optimizer.drop_gradients()
        for copy in self._copies:
            copy.offload()

    def onload(self) -> None:
        """Move everything back to the device, as it was."""
        for copy in self._copies:
            copy.onload()
        for optimizer in self.optimizers.values():
            if not len(optimizer.gradients):
                optimizer.make_gradients()

    # ------------------------------------------------------------ one mini-batch

    def _step(
        self, iteration: int, batch: TrainingBatch, rows: list[int], objectives: Mapping[str, Objective]
    ) -> dict[str, float]:
        """Take one optimizer step by the gradients of a mini-batch; return each model's gradient norm before clipping.

        Return nothing, and take no step, when a loss or a gradient is not finite.
        """
        work = self.mini_batch(batch, rows, objectives)
        before = {model: objective.statistics.copy() for model, objective in objectives.items()}
        first_rank = self.layout.block * self.layout.block_size
        start = time.time_ns()
        measured = execute(self.layout.row, work, self.communicator, first_rank, self.synchronize)
        self._report(measured, start, time.time_ns())
        with self._measured("train/gradients"):
            self._reduce_gradients()
            losses, squares = self._sizes(objectives, before)
        allowed = self.spec.training.optimizer.max_non_finite_steps
        if problem := self.progress.non_finite.problem(losses, squares, iteration, self.progress.steps, allowed):
            if self.layout.rank == 0:
                log.warning(problem)
            for model, objective in objectives.items():
                objective.statistics = before[model]
            for optimizer in self.optimizers.values():
                optimizer.gradients.zero_()
            return {}
        norms = {model: sum(squares[key] for key in squares if key[0] == model) ** 0.5 for model in self.layout.models}
        with self._measured("train/optimizer"):
            limit = self.spec.training.optimizer.max_gradient_norm
            for (model, _), optimizer in self.optimizers.items():
                scale = 1.0 if limit is None or norms[model] <= limit else limit / norms[model]
                optimizer.step(self.rate(model), scale)
        self._rates = {model: self.rate(model) for model in self.layout.models}
        self.progress.steps += 1
        return norms

    def rate(self, model: str) -> float:
        """Return the learning rate of a model's next optimizer step."""
        fields = self.spec.training.optimizer
        return learning_rate(fields, self.peaks[model], self.progress.steps, self.progress.horizon)

    def _steps_of(self, iterations: int) -> int:
        batches = self.spec.rollout.batch_size // self.spec.algorithm.fields.mini_batch_size
        return iterations * self.spec.algorithm.fields.epochs * batches

    def _look_ahead(self, total: int) -> None:
        """Plan the learning rate for a job that has `total` steps from now on."""
        progress, warmup = self.progress, self.spec.training.optimizer.warmup_steps
        if total != progress.horizon.total:
            progress.horizon = progress.horizon.changed(total, progress.steps, warmup)

    def use_table(self, table: ScheduleTable) -> None:
        """Train by another table from the next mini-batch on; ValueError when it places stages on other ranks."""
        self.layout = self.layout.with_table(table)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self.communicator.all_reduce_sum(torch.zeros(1, device=self.device), self._everyone)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for what the device still computes."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def mini_batch(
        self, batch: TrainingBatch, rows: list[int], objectives: Mapping[str, Objective]
    ) -> dict[int, StageWork]:
        """Return what this rank computes for the samples `rows`, by pipeline index."""
        weights = self.algorithm.token_weights(batch, rows)
        made: dict[tuple[int, ...], MicroBatch] = {}
        lengths = batch.lengths
        work = {}
        for index, pipeline in enumerate(self.layout.table.pipelines):
            held = {stage: self.stages[model, stage] for model, stage in self.stages if model == pipeline.model}
            if not held:
                continue
            model = pipeline.model
            assigned = split(rows, lengths, self.layout.replicas(model), self.layout.microbatches(model))
            microbatches = []
            for chosen in assigned[self.layout.replica(index)]:
                if tuple(chosen) not in made:
                    made[tuple(chosen)] = micro_batch(batch, chosen, weights).to(self.device)
                microbatches.append(made[tuple(chosen)])
            work[index] = StageWork(len(pipeline.stage_ranks), held, microbatches, objectives[model], self.compute)
        return work

    def _reduce_gradients(self) -> None:
        """Add up over replicas, then over the two copies of a tied embedding; every rank in the same order."""
        for model, stage in self.layout.held:
            self.communicator.all_reduce_sum(self.optimizers[model, stage].gradients, self.layout.holders(model, stage))
        for model in self.layout.models:
            last = self.layout.stages(model) - 1
            if last == 0 or not any(stage.tied for (name, _), stage in self.stages.items() if name == model):
                continue
            for ends in self.layout.ends(model):
                if ends[0] == ends[1] == self.layout.rank:
                    views = [self.optimizers[model, stage].gradient(EMBEDDING) for stage in (0, last)]
                    views[0] += views[1]
                    views[1].copy_(views[0])
                elif self.layout.rank in ends:
                    stage = 0 if self.layout.rank == ends[0] else last
                    self.communicator.all_reduce_sum(self.optimizers[model, stage].gradient(EMBEDDING), ends)

    def _sizes(
        self, objectives: Mapping[str, Objective], before: Mapping[str, Statistics]
    ) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
        """Return the loss of each model and the squared gradient norm of each stage, the same on all ranks.

        Each stage fills its own slot, so that the sum over ranks only adds zeros; losses add up over replicas.
        """
        sums = torch.zeros(len(self._slots) + len(objectives), dtype=torch.float64, device=self.device)
        for place, key in enumerate(self._slots):
            if key in self.optimizers and self.layout.writes(*key):
                sums[place] = self.optimizers[key].norm_squared()
        for place, (model, objective) in enumerate(objectives.items(), len(self._slots)):
            sums[place] = objective.statistics["loss"] - before[model]["loss"]
        self.communicator.all_reduce_sum(sums, self._everyone)
        values = sums.tolist()
        losses = dict(zip(objectives, values[len(self._slots) :], strict=True))
        return losses, dict(zip(self._slots, values, strict=False))

    # ------------------------------------------------------------ metrics

    def objectives(self) -> dict[str, Objective]:
        """Return trained role -> objective without statistics, in table order."""
        objectives = self.algorithm.objectives()
        return {model: objectives[model] for model in self.layout.models}

    def _metrics(
        self, batch: TrainingBatch, objectives: Mapping[str, Objective], norms: Mapping[str, list[float]]
    ) -> dict[str, float]:
        metrics = self.algorithm.batch_metrics(batch)
        for model, objective in objectives.items():
            self.communicator.all_reduce_sum(objective.statistics.sums, self._everyone)
            self.communicator.all_reduce_max(objective.statistics.maxima, self._everyone)
            metrics |= objective.metrics()
            steps = max(1, len(norms[model]))
            metrics[f"{model}/loss"] = metrics.pop(f"{model}/loss_sum") / steps
            metrics[f"gradient_norm/{model}"] = sum(norms[model]) / steps
            metrics[f"learning_rate/{model}"] = self._rates[model] if norms[model] else self.rate(model)
        mismatch = f"{self.algorithm.context.graph.policy}/mismatch"
        if metrics.get(mismatch, 0.0) > MISMATCH_WARNING and self.layout.rank == 0:
            log.warning(
                "log-probabilities of generation and training differ by %.3g on average (largest %.3g): the ratio of "
                "the policy loss is biased by as much",
                metrics[mismatch],
                metrics[f"{mismatch}_max"],
            )
        return metrics

    def _report(self, measured: list[TimedAction], start_ns: int, end_ns: int) -> None:
        busy = sum(step.end_ns - step.start_ns for step in measured if step.action.peer is None)
        self.step_seconds.append((end_ns - start_ns) / 1e9)
        self.bubble_seconds += (end_ns - start_ns - busy) / 1e9
        number = str(len(self.step_seconds) - 1)
        self._span("train/step", start_ns, end_ns, number=number, schedule=self.layout.table.method)
        for step in measured:
            action = step.action
            pipeline = self.layout.table.pipelines[action.pipeline]
            name = f"train/{pipeline.name}/{NAMES[action.kind]}"
            attributes = {"stage": str(action.stage), "microbatch": str(action.microbatch)}
            self._span(name, step.start_ns, step.end_ns, **attributes)

    @contextmanager
    def _measured(self, name: str) -> Iterator[Any]:
        start = time.time_ns()
        yield
        self._span(name, start, time.time_ns())


def _check_sizes(spec: RLHFJobSpec, layout: RankLayout) -> None:
    size = spec.algorithm.fields.mini_batch_size
    for model in layout.models:
        cells = layout.replicas(model) * layout.microbatches(model)
        if size % cells:
            raise WorkError(
                "BadSchedule",
                f"spec.algorithm.{spec.algorithm.name}.miniBatchSize: {size} does not divide into the {cells} "
                f"micro-batches of the {model}'s schedule",
                field=f"spec.algorithm.{spec.algorithm.name}.miniBatchSize",
            )
