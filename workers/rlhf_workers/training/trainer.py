"""One training iteration on one rank: advantages, epochs, and mini-batches, which run a schedule table.

Rule: results depend only on the arguments of `train`, the manifest, the table and the state in checkpoints. All ranks
base their decisions on the same numbers.
"""

import logging
import math
import time
from collections.abc import Generator, Mapping, Sequence

import torch

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_common.schedule import ScheduleTable
from rlhf_workers.algorithms.objectives import Objective, Statistics
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.devices.host_copies import wait_for
from rlhf_workers.models.precision import shared_casts
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.batches.micro_batch_splitter import MicroBatchSplitter
from rlhf_workers.training.batches.minibatches import check_mini_batch, epoch_order, mini_batches
from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch, micro_batch
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.draft_training import DraftTraining
from rlhf_workers.training.gradient_stream import GradientStream
from rlhf_workers.training.model_order import train_policy_first
from rlhf_workers.training.objective_metrics import Norms, Objectives, objective_metrics, say_mismatch
from rlhf_workers.training.old_log_probabilities import OldLogProbabilities
from rlhf_workers.training.optimizers.optimizer import Horizon, StageOptimizer, learning_rate
from rlhf_workers.training.optimizers.shared_updates import broadcast_updates, gather_weights
from rlhf_workers.training.parallel.context_group import context_group
from rlhf_workers.training.parallel.gradient_reduction import all_reduce_norms, sum_gradients
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.device_timers import DeviceTimers
from rlhf_workers.training.schedule.executor import TimedAction, execute
from rlhf_workers.training.schedule.step_spans import give_spans, measured
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.stages.stage_work import Note, StageWork, mini_batch_work
from rlhf_workers.training.training_hooks import TrainingHook
from rlhf_workers.training.training_progress import TrainingProgress, steps_of

log = logging.getLogger(__name__)


class Trainer:
    """Holds this rank's stages and optimizers. `trainer_build` creates it."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        layout: RankLayout,
        stages: Mapping[tuple[str, int], PipelineStage],
        optimizers: Mapping[tuple[str, int], StageOptimizer],
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        span: SpanSink,
        *,
        device_timers: DeviceTimers,
        hooks: Sequence[TrainingHook],
        draft: DraftTraining | None,
        old_log_probabilities: OldLogProbabilities | None,
        splitter: MicroBatchSplitter,
    ) -> None:
        """`draft`, which is one of `hooks`, is saved and published with the models. `old_log_probabilities` is None if
        losses use the engine's. Raises WorkError if the mini-batch does not divide, or for an unusable plug-in.
        """
        self.spec, self.layout, self.stages, self.optimizers = spec, layout, stages, optimizers
        self.communicator, self.device, self.compute, self._span = communicator, device, compute, span
        self.device_timers, self.hooks, self.draft, self._old_logprobs = (
            device_timers,
            hooks,
            draft,
            old_log_probabilities,
        )
        self.algorithm = build_algorithm(spec, device)
        self._samples_per_unit, self.splitter = spec.algorithm.fields.samples_per_unit, splitter
        self.progress = TrainingProgress(0, Horizon(steps_of(spec, spec.iterations)))
        peak = spec.training.optimizer.peak_learning_rate
        self.peaks = {model: peak(ModelRole(model)) for model in layout.models}
        self._policy = self.algorithm.context.graph.policy
        self._policy_held = False
        """Whether the current iteration trains only critics."""
        self._context = context_group(layout, communicator)
        self.step_seconds: list[float] = []
        """Seconds in this rank's row of the table for each mini-batch of the last iteration with a token to train
        on."""
        self.bubble_seconds = 0.0
        """Seconds without computation in the mini-batches of the last iteration."""
        self.sample_advantages: list[float] = []
        """Mean advantage over each sample's trained tokens in the last iteration, NaN without any; empty: no
        advantages."""
        self.sample_rewards: list[float] = []
        """Shaped reward of each sample of the last iteration, NaN for a sample that is not valid."""
        self.critics_behind = False
        """Whether only the policy of the current iteration is trained; its weights are then final."""
        self._rates: dict[str, float] = {}
        """Learning rate of the last optimizer step, by model."""
        self.stream = GradientStream()
        """Gradients of an iteration whose batch is not complete."""
        check_mini_batch(spec, layout)

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int = 0, *, policy_first: bool = False
    ) -> Generator[None, None, dict[str, float]]:
        """Train one iteration, at most one mini-batch per step of the iterator, and return its metrics.

        `iterations`: current total of the job; 0: the manifest's. `policy_first`: train the policy before the other
        models; `critics_behind` is set at the step in between.
        """
        state, steps = self.algorithm.state(), self.progress.steps
        try:
            return (yield from self._train(iteration, batch, iterations, policy_first))
        except Exception:
            untouched = self.progress.steps == steps and not self.critics_behind
            if untouched:  # the weights did not change, so the algorithm's state must not either
                self.algorithm.restore(state)
            raise

    def _train(
        self, iteration: int, batch: TrainingBatch, iterations: int, policy_first: bool
    ) -> Generator[None, None, dict[str, float]]:
        streamed = bool(self.stream.chunks(iteration))
        if not streamed:
            self.begin_iteration()
        total = steps_of(self.spec, iterations or self.spec.iterations)
        self.progress.look_ahead(total, self.spec.training.optimizer.warmup_steps)
        self._policy_held = not self.spec.algorithm.fields.trains_policy(iteration)
        if self._old_logprobs is not None:
            batch = yield from self._old_logprobs.added_to(iteration, batch, self.layout)
        with measured(self._span, "train/advantages"):
            self.algorithm.begin_iteration(iteration)
            batch = self.algorithm.prepare(batch)
            objectives = self.stream.objectives if streamed else self.objectives()
        if self._policy_held:
            del objectives[self._policy]
        self.sample_advantages = batch.sample_means("advantages")
        self.sample_rewards = self.algorithm.shaped_rewards(batch).masked_fill(~batch.valid, math.nan).tolist()
        norms: Norms = {model: [] for model in objectives}
        non_finite = self.progress.non_finite.total
        if streamed:
            skipped = self.stream.finish(self, norms)
        elif policy_first and not self._policy_held and len(objectives) > 1:
            skipped = yield from train_policy_first(self, self._policy, iteration, batch, objectives, norms)
        else:
            skipped = yield from self.train_models(iteration, batch, objectives, norms, set())
        metrics = self.algorithm.batch_metrics(batch)
        metrics |= objective_metrics(objectives, norms, self.layout, self.communicator)
        metrics |= {f"learning_rate/{m}": self._rates[m] if norms[m] else self.rate(m) for m in objectives}
        if self.layout.rank == 0:
            say_mismatch(self._policy, metrics)
        for hook in self.hooks:
            metrics |= hook.metrics(objectives, self.layout)
        metrics |= {"train/skipped_steps": float(skipped), **self.progress.non_finite.metrics(non_finite)}
        if not self.spec.algorithm.fields.trains_policy(0):
            metrics["train/critic_only"] = float(self._policy_held)
        self.algorithm.finish_iteration(metrics)
        self.critics_behind = False
        return metrics

    def begin_iteration(self) -> None:
        """Reset the times and the hooks of an iteration."""
        self.step_seconds, self.bubble_seconds = [], 0.0
        for hook in self.hooks:
            hook.begin()

    def accumulate(self, iteration: int, samples: tuple[int, ...], chunk: TrainingBatch) -> int:
        """Add the gradients of the next chunk of an iteration, whole prompts, and take no step; return its
        micro-batches on this rank. `samples`: numbers of its samples in the batch.

        The `train` of the iteration takes the step with them. After an exception the iteration has no gradients.
        """
        try:
            return self.stream.add(self, iteration, samples, chunk)
        except Exception:
            self.stream.drop(self.optimizers.values())
            raise

    def train_models(
        self, iteration: int, batch: TrainingBatch, objectives: Objectives, norms: Norms, left_out: set[int]
    ) -> Generator[None, None, int]:
        """Train some models on every mini-batch; return the number of mini-batches without a token to train on.

        `left_out`: mini-batches whose step was skipped, so a later pass skips it too.
        """
        skipped, steps, number = 0, self.progress.steps, -1
        for epoch in range(self.spec.algorithm.fields.epochs):
            order = epoch_order(self.spec.seed, iteration, epoch, len(batch.prompts), self._samples_per_unit)
            for rows in mini_batches(order, self.spec.algorithm.fields.mini_batch_size):
                number += 1
                if not batch.mask[rows].any():  # no token to train on: no gradient, so no step either
                    skipped += 1
                    continue
                if number in left_out:
                    self.step_seconds.append(0.0)
                    continue
                for objective in objectives.values():
                    objective.first_pass = self.progress.steps == steps and self._old_logprobs is None
                taken = self._step(iteration, batch, rows, objectives)
                if not taken:
                    left_out.add(number)
                for model, norm in taken.items():
                    norms[model].append(norm)
                yield
        gather_weights(objectives, self.layout, self.optimizers, self.communicator, self._span)
        return skipped

    def offload(self) -> None:
        """Let every hook move its state to host memory, between two trainings."""
        for hook in self.hooks:
            hook.offload()

    def onload(self) -> None:
        """Let every hook move its state back to the device unchanged."""
        for hook in self.hooks:
            hook.onload()

    # ------------------------------------------------------------ one mini-batch

    def _step(self, iteration: int, batch: TrainingBatch, rows: list[int], objectives: Objectives) -> dict[str, float]:
        """Take one optimizer step with the gradients of a mini-batch; return each model's gradient norm before
        clipping.

        Return an empty result, without a step, if a loss or a gradient is not finite. Raises WorkError after too many.
        """
        before = {model: objective.statistics.copy() for model, objective in objectives.items()}
        self.add_gradients(batch, self.splitter.split(self.layout, rows, batch), objectives)
        return self.take_step(iteration, objectives, before)

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
        hooks = self.hooks if self._policy in objectives else ()
        for hook in () if self.critics_behind else self.hooks:
            hook.add_mini_batch(plan, batch.lengths, continued=continued)
        layout = plan.layout.of_models(objectives)
        notes = [note for hook in hooks if (note := hook.policy_note())]
        work = self.mini_batch(batch, plan, objectives, notes, factor)
        start = time.time_ns()
        with shared_casts(self.device, self.compute):
            timed = self.execute(layout, work)
        self._report(timed, start, time.time_ns())
        tokens = int(batch.mask[plan.samples].sum())
        for hook in hooks:
            hook.backward(tokens)

    def take_step(self, iteration: int, objectives: Objectives, before: Mapping[str, Statistics]) -> dict[str, float]:
        """Take the step of `_step`, with all gradients so far. `before`: statistics of the models before these."""
        hooks = self.hooks if self._policy in objectives else ()
        with measured(self._span, "train/gradients"):
            sum_gradients(objectives, self.layout, self.stages, self.optimizers, self.communicator)
            losses, squares = all_reduce_norms(objectives, before, self.layout, self.optimizers, self.communicator)
        allowed = self.spec.training.optimizer.max_non_finite_steps
        if problem := self.progress.non_finite.problem(losses, squares, iteration, self.progress.steps, allowed):
            if self.layout.rank == 0:
                log.warning(problem)
            for model, objective in objectives.items():
                objective.statistics = before[model]
            for optimizer in self.optimizers.values():
                optimizer.gradients.zero_()
            for hook in hooks:
                hook.forget()
            return {}
        norms = {model: sum(squares[key] for key in squares if key[0] == model) ** 0.5 for model in objectives}
        with measured(self._span, "train/optimizer"):
            limit = self.spec.training.optimizer.max_gradient_norm
            for model, stage in self.layout.local_stages:
                if model in objectives:
                    scale = 1.0 if limit is None or norms[model] <= limit else limit / norms[model]
                    self.optimizers[model, stage].step(self.rate(model), scale)
        broadcast_updates(objectives, self.layout, self.optimizers, self.communicator, self._span)
        for hook in hooks:
            hook.step()
        self._rates |= {model: self.rate(model) for model in objectives}
        self.progress.steps += 1
        self.progress.held_steps += self._policy_held
        return norms

    def execute(self, layout: RankLayout, work: Mapping[int, StageWork]) -> list[TimedAction]:
        """Run this rank's row of a layout's table."""
        return execute(layout.row, work, self.communicator, layout.first_rank, self.device_timers, apart=layout.tensor)

    def rate(self, model: str) -> float:
        """Return the learning rate of a model's next optimizer step."""
        fields, progress = self.spec.training.optimizer, self.progress
        return learning_rate(fields, self.peaks[model], progress.steps, progress.horizon, self.held_steps(model))

    def held_steps(self, model: str) -> int:
        """Return the number of the job's optimizer steps so far in which a model took no part."""
        return self.progress.held_steps if model == self._policy else 0

    def writes(self, model: str, stage: int) -> bool:
        """Return whether this rank saves a stage, or a part of it that no other rank has."""
        return self.layout.writes(model, stage) or self.optimizers[model, stage].over_data

    def use_table(self, table: ScheduleTable) -> None:
        """Use another table from the next mini-batch on. Raises ValueError if it has other pipelines."""
        self.layout = self.layout.with_table(table)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self.communicator.all_reduce_sum(torch.zeros(1, device=self.device), tuple(range(self.layout.world)))
        wait_for(self.device)

    def mini_batch(
        self,
        batch: TrainingBatch,
        plan: MicroBatchPlan,
        objectives: Objectives,
        notes: Sequence[Note] = (),
        factor: float = 1.0,
    ) -> dict[int, StageWork]:
        """Return this rank's work on a mini-batch, by pipeline index, for the models with an objective.

        `notes` receive the outputs of the policy's last stage. `factor` multiplies every loss.
        """
        weights = self.algorithm.token_weights(batch, plan.samples)
        if factor != 1.0:
            weights = {model: values * factor for model, values in weights.items()}

        def cell(samples: list[int]) -> MicroBatch:
            return micro_batch(batch, samples, weights, plan.packed, self._context, plan.prompts).to(self.device)

        losses = {model: objective.loss for model, objective in objectives.items()}
        return mini_batch_work(self.layout, self.stages, plan, losses, cell, self.compute, {self._policy: notes})

    def objectives(self) -> dict[str, Objective]:
        """Return trained role -> objective with empty statistics, in table order."""
        objectives = self.algorithm.objectives()
        return {model: objectives[model] for model in self.layout.models}

    def _report(self, timed: list[TimedAction], start_ns: int, end_ns: int) -> None:
        busy = sum(step.end_ns - step.start_ns for step in timed if step.action.peer is None)
        self.step_seconds.append((end_ns - start_ns) / 1e9)
        self.bubble_seconds += (end_ns - start_ns - busy) / 1e9
        number = str(len(self.step_seconds) - 1)
        self._span("train/step", start_ns, end_ns, number=number, schedule=self.layout.table.method)
        give_spans(self._span, timed, self.layout.table)
