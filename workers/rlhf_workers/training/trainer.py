"""One training iteration on one rank: advantages, epochs, mini-batches; each mini-batch is one execution of the table.

Rule: what is computed depends on (batch, seed, iteration, weights, table) alone, so a replay gives the same weights,
and pipelines, replicas and micro-batches change a gradient by nothing but the order of float32 sums: every token's
weight in the loss comes from the whole mini-batch. All ranks take every decision from the same numbers. A process
that dies here loses only this rank's memory: the group restarts from its last checkpoint and replays journaled
batches.
"""

import logging
import math
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.lora import Lora
from rlhf_api.schedule import ScheduleTable
from rlhf_workers.algorithms.objectives import Objective
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.precision import shared_casts
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.communicator import Communicator
from rlhf_workers.training.context_group import context_group
from rlhf_workers.training.draft_training import DraftTraining
from rlhf_workers.training.executor import TimedAction, execute
from rlhf_workers.training.expert_use import ExpertUse
from rlhf_workers.training.finished_pieces import piece_finished
from rlhf_workers.training.gradient_sums import sum_gradients, sum_sizes
from rlhf_workers.training.minibatches import check_mini_batch, epoch_order, mini_batches
from rlhf_workers.training.objective_metrics import Norms, objective_metrics, offload_metrics, say_mismatch
from rlhf_workers.training.old_log_probabilities import OldLogProbabilities
from rlhf_workers.training.optimizer import Horizon, learning_rate
from rlhf_workers.training.pipeline_stage import PipelineStage
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.sharded_optimizer import optimizer_of
from rlhf_workers.training.shared_moments import moment_shares
from rlhf_workers.training.stage_copy import StageCopy
from rlhf_workers.training.stage_work import Note, StageWork
from rlhf_workers.training.step_spans import name_of
from rlhf_workers.training.time_marks import time_marks_of
from rlhf_workers.training.token_bounds import Dealt, Padding, deal
from rlhf_workers.training.training_batch import MicroBatch, TrainingBatch, micro_batch
from rlhf_workers.training.training_progress import TrainingProgress

log = logging.getLogger(__name__)


class Trainer:
    """Holds this rank's stages and optimizers."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        layout: RankLayout,
        stages: Mapping[tuple[str, int], PipelineStage],
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        span: SpanSink,
        draft: DraftTraining | None = None,
    ) -> None:
        """`stages` are those of `layout.held`; `draft`: None trains no draft model. WorkError when the mini-batch does
        not divide."""
        self.draft = draft
        self.spec, self.layout, self.stages, self.communicator = spec, layout, stages, communicator
        self.device, self.compute, self._span = device, compute, span
        self.algorithm = build_algorithm(spec, device)
        self._together = spec.algorithm.fields.samples_per_unit
        self._padding = Padding()
        """Of the last iteration."""
        self.progress = TrainingProgress(0, Horizon(self._steps_of(spec.iterations)))
        fields = spec.training.optimizer
        self.peaks = {model: fields.peak_learning_rate(ModelRole(model)) for model in layout.models}
        shares = {key: moment_shares(layout, *key, spec.training.parallelism) for key in stages}
        offload = spec.training.parallelism.offload_optimizer
        self.optimizers = {key: optimizer_of(stage, fields, shares[key], offload) for key, stage in stages.items()}
        self._copies = list(self._stage_copies())
        self._experts = ExpertUse(stages, layout)
        for stage in stages.values():
            stage.recompute = spec.training.activation_checkpointing
        self.time_marks = time_marks_of(device)
        self._policy = self.algorithm.context.graph.policy
        self._policy_held = False
        """Whether the present iteration trains critics alone."""
        self._again = None
        if spec.algorithm.fields.scores_again:
            marks = self.time_marks
            self._again = OldLogProbabilities(spec, self._policy, stages, communicator, device, compute, marks, span)
        self._everyone = tuple(range(layout.world))
        self._context = context_group(layout, communicator)
        self.step_seconds: list[float] = []
        """Of every mini-batch of the last iteration: from its first action on this rank to its last."""
        self.bubble_seconds = 0.0
        """Of the last iteration: in mini-batches, but in no computation."""
        self.sample_advantages: list[float] = []
        """Of the last iteration: of each sample the mean over its tokens, NaN without any; empty: no such field."""
        self.sample_rewards: list[float] = []
        """Of the last iteration: of each sample the reward after all shaping, NaN where it is not trained on."""
        self.critics_behind = False
        """Of the iteration in progress only the policy is trained, whose weights will not change any more."""
        self._rates: dict[str, float] = {}
        """Of the last optimizer step, by model."""
        check_mini_batch(spec, layout)

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int = 0, *, policy_first: bool = False
    ) -> Generator[None, None, dict[str, float]]:
        """Train one iteration, one mini-batch per step of the iterator, and return its metrics (`yield from`).

        `iterations`: of the job as of this one; 0: as the manifest has it. `policy_first`: all mini-batches of the
        policy come before those of other models; in between is a step after which `critics_behind` holds.
        """
        state, steps = self.algorithm.state(), self.progress.steps
        try:
            return (yield from self._train(iteration, batch, iterations, policy_first))
        except Exception:
            untouched = self.progress.steps == steps and not self.critics_behind
            if untouched:  # the weights are as they were: so is what the algorithm remembers
                self.algorithm.restore(state)
            raise

    def _train(
        self, iteration: int, batch: TrainingBatch, iterations: int, policy_first: bool
    ) -> Generator[None, None, dict[str, float]]:
        self.step_seconds, self.bubble_seconds, self._padding = [], 0.0, Padding()
        self._experts.begin()
        if self.draft is not None:
            self.draft.begin()
        warmup = self.spec.training.optimizer.warmup_steps
        self.progress.look_ahead(self._steps_of(iterations or self.spec.iterations), warmup)
        self._policy_held = not self.spec.algorithm.fields.trains_policy(iteration)
        if self._again is not None:
            batch = yield from self._again.added_to(iteration, batch, self.layout)
        with self._measured("train/advantages"):
            self.algorithm.begin_iteration(iteration)
            batch = self.algorithm.prepare(batch)
            objectives = self.objectives()
        if self._policy_held:
            del objectives[self._policy]
        self.sample_advantages = batch.sample_means("advantages")
        self.sample_rewards = self.algorithm.shaped_rewards(batch).masked_fill(~batch.valid, math.nan).tolist()
        norms: Norms = {model: [] for model in objectives}
        non_finite = self.progress.non_finite.total
        if policy_first and not self._policy_held and len(objectives) > 1:
            skipped = yield from self._train_policy_first(iteration, batch, objectives, norms)
        else:
            skipped = yield from self._train_models(iteration, batch, objectives, norms, set())
            self._gather_weights(objectives)
        metrics = self.algorithm.batch_metrics(batch)
        metrics |= objective_metrics(objectives, norms, self.layout, self.communicator)
        metrics |= {f"learning_rate/{m}": self._rates[m] if norms[m] else self.rate(m) for m in objectives}
        if self.layout.rank == 0:
            say_mismatch(self._policy, metrics)
        if self.draft is not None:
            metrics |= self.draft.metrics()
        if self.spec.training.parallelism.offload_optimizer:
            taught = None if self.draft is None else self.draft.optimizer
            held = [*self.optimizers.values(), taught]
            metrics |= offload_metrics(held, self.layout, self.communicator, self.device)
        metrics |= self._padding.metrics()
        metrics |= self._experts.metrics(objectives, self.layout, self.communicator, self.device)
        metrics["train/skipped_steps"] = float(skipped)
        metrics["train/nonfinite_steps"] = float(self.progress.non_finite.total - non_finite)
        metrics["train/nonfinite_steps_total"] = float(self.progress.non_finite.total)
        if not self.spec.algorithm.fields.trains_policy(0):
            metrics["train/critic_only"] = float(self._policy_held)
        self.algorithm.finish_iteration(metrics)
        self.critics_behind = False
        return metrics

    def _train_policy_first(
        self, iteration: int, batch: TrainingBatch, objectives: Mapping[str, Objective], norms: Norms
    ) -> Generator[None, None, int]:
        """Train the policy on all mini-batches, then the other models on the same, from the same optimizer step on."""
        start, left_out = self.progress.steps, set[int]()
        policy: dict[str, Objective] = {self._policy: objectives[self._policy]}
        skipped = yield from self._train_models(iteration, batch, policy, norms, left_out)
        self._gather_weights(policy)
        end, of_policy = self.progress.steps, self.step_seconds
        self.progress.steps, self.step_seconds, self.critics_behind = start, [], True
        yield
        critics = {model: objective for model, objective in objectives.items() if model != self._policy}
        yield from self._train_models(iteration, batch, critics, norms, left_out)
        self._gather_weights(critics)
        self.step_seconds = [sum(seconds) for seconds in zip(of_policy, self.step_seconds, strict=True)]
        self.progress.steps = end
        return skipped

    def _train_models(
        self,
        iteration: int,
        batch: TrainingBatch,
        objectives: Mapping[str, Objective],
        norms: Norms,
        left_out: set[int],
    ) -> Generator[None, None, int]:
        """Train some models on every mini-batch; return how many had no sample to train on.

        `left_out`: mini-batches whose step the policy did not take, which others do not take either; added to.
        """
        skipped, steps, number = 0, self.progress.steps, -1
        for epoch in range(self.spec.algorithm.fields.epochs):
            order = epoch_order(self.spec.seed, iteration, epoch, len(batch.prompts), self._together)
            for rows in mini_batches(order, self.spec.algorithm.fields.mini_batch_size):
                number += 1
                if not batch.mask[rows].any():  # every sample abstained: no gradient, so no step either
                    skipped += 1
                    continue
                if number in left_out:
                    self.step_seconds.append(0.0)
                    continue
                for objective in objectives.values():
                    objective.first_pass = self.progress.steps == steps and self._again is None
                taken = self._step(iteration, batch, rows, objectives)
                if not taken:
                    left_out.add(number)
                for model, norm in taken.items():
                    norms[model].append(norm)
                yield
        return skipped

    def offload(self) -> None:
        """Move weights and moments to host memory and free the gradients, which are all zero between two trainings."""
        for optimizer in self.optimizers.values():
            optimizer.drop_gradients()
        for copy in self._copies:
            copy.offload()
        if self.draft is not None:
            self.draft.offload()

    def onload(self) -> None:
        """Move everything back to the device, as it was."""
        for copy in self._copies:
            copy.onload()
        for optimizer in self.optimizers.values():
            if not len(optimizer.gradients):
                optimizer.make_gradients()
        if self.draft is not None:
            self.draft.onload()

    def _stage_copies(self) -> Iterator[StageCopy]:
        """A copy a stage; what several stages use moves with the first."""
        moved: set[int] = set()
        for key, stage in self.stages.items():
            if self.optimizers[key].part:  # parts do not move: rules refuse ranks that share a device with others
                continue
            yield StageCopy(stage, self.optimizers[key], self.device, frozenset(moved))
            moved |= {id(part) for part in stage.parameters()}

    # ------------------------------------------------------------ one mini-batch

    def _step(
        self, iteration: int, batch: TrainingBatch, rows: list[int], objectives: Mapping[str, Objective]
    ) -> dict[str, float]:
        """Take one optimizer step by the gradients of a mini-batch; return each model's gradient norm before clipping.

        Return nothing, and take no step, when a loss or a gradient is not finite.
        """
        draft = self.draft if self._policy in objectives else None
        training = self.spec.training
        dealt = deal(self.layout, rows, batch.lengths, self._together, training.micro_batch_tokens, training.packing)
        if not self.critics_behind:
            self._padding.add(dealt, batch.lengths)
        layout = dealt.layout.of_models(objectives)
        work = self.mini_batch(batch, dealt, objectives, None if draft is None else draft.note)
        before = {model: objective.statistics.copy() for model, objective in objectives.items()}
        start = time.time_ns()
        with shared_casts(self.device, self.compute):
            measured = self.execute(layout, work)
        self._report(measured, start, time.time_ns())
        if draft is not None:
            with self._measured("train/draft"):
                draft.backward(int(batch.mask[rows].sum()))
        with self._measured("train/gradients"):
            sum_gradients(objectives, self.layout, self.stages, self.optimizers, self.communicator)
            losses, squares = sum_sizes(objectives, before, self.layout, self.optimizers, self.communicator)
        allowed = self.spec.training.optimizer.max_non_finite_steps
        if problem := self.progress.non_finite.problem(losses, squares, iteration, self.progress.steps, allowed):
            if self.layout.rank == 0:
                log.warning(problem)
            for model, objective in objectives.items():
                objective.statistics = before[model]
            for optimizer in self.optimizers.values():
                optimizer.gradients.zero_()
            if draft is not None:
                draft.forget()
            return {}
        norms = {model: sum(squares[key] for key in squares if key[0] == model) ** 0.5 for model in objectives}
        with self._measured("train/optimizer"):
            limit = self.spec.training.optimizer.max_gradient_norm
            for model, stage in self.layout.held:
                if model in objectives:
                    scale = 1.0 if limit is None or norms[model] <= limit else limit / norms[model]
                    self.optimizers[model, stage].step(self.rate(model), scale)
        self._hand_on(objectives)
        if draft is not None:
            with self._measured("train/draft-step"):
                draft.step()
        self._rates |= {model: self.rate(model) for model in objectives}
        self.progress.steps += 1
        self.progress.held_steps += self._policy_held
        return norms

    def execute(self, layout: RankLayout, work: Mapping[int, StageWork]) -> list[TimedAction]:
        """Run this rank's row of a layout's table."""
        return execute(layout.row, work, self.communicator, layout.first_rank, self.time_marks, apart=layout.tensor)

    def rate(self, model: str) -> float:
        """Return the learning rate of a model's next optimizer step."""
        fields, progress = self.spec.training.optimizer, self.progress
        return learning_rate(fields, self.peaks[model], progress.steps, progress.horizon, self.held_steps(model))

    def held_steps(self, model: str) -> int:
        """Return how many of the job's optimizer steps so far a model took no part in."""
        return self.progress.held_steps if model == self._policy else 0

    def _steps_of(self, iterations: int) -> int:
        batches = self.spec.rollout.batch_size // self.spec.algorithm.fields.mini_batch_size
        return iterations * self.spec.algorithm.fields.epochs * batches

    def writes(self, model: str, stage: int) -> bool:
        """Return whether this rank saves a stage, or a part of it that no other rank has."""
        return self.layout.writes(model, stage) or self.optimizers[model, stage].over_data

    def adapters(self, model: str) -> Lora | None:
        """Return the adapters by which a model is trained; None where all its weights are."""
        return self.spec.training.adapters(ModelRole(model))

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
        self, batch: TrainingBatch, dealt: Dealt, objectives: Mapping[str, Objective], note: Note | None = None
    ) -> dict[int, StageWork]:
        """Return what this rank computes for a mini-batch's samples of the models that have an objective, by pipeline
        index. `note`: told of what the policy's last stage makes."""
        weights = self.algorithm.token_weights(batch, dealt.samples)
        made: dict[tuple[int, ...], MicroBatch] = {}
        work = {}
        for index, pipeline in enumerate(self.layout.table.pipelines):
            held = {stage: self.stages[model, stage] for model, stage in self.stages if model == pipeline.model}
            model = pipeline.model
            if not held or model not in objectives:
                continue
            microbatches = []
            for chosen in dealt.splits[model][self.layout.replica(index)]:
                if tuple(chosen) not in made:
                    made[tuple(chosen)] = micro_batch(batch, chosen, weights, dealt.packed, self._context).to(
                        self.device
                    )
                microbatches.append(made[tuple(chosen)])
            seen_by = note if model == self._policy else None
            work[index] = StageWork(
                len(pipeline.stage_ranks), held, microbatches, objectives[model].loss, self.compute, seen_by
            )
        return work

    def _hand_on(self, models: Collection[str]) -> None:
        """Bring the copies of a stage that share its moments up to date with what each has stepped."""
        shared = [key for key in self.layout.held if key[0] in models and self.optimizers[key].shares.part]
        if shared:
            with self._measured("train/hand-on"):
                for key in shared:
                    self.optimizers[key].hand_on(self.communicator)

    def _gather_weights(self, models: Collection[str]) -> None:
        """Make whole parameters of those of some models that ranks hold in parts. Here and nowhere else: a training is
        what all ranks do once and together, while publishing and saving may be asked of one rank, or of one again."""
        if any(optimizer.part for optimizer in self.optimizers.values()):
            with self._measured("train/gather"):
                for key in self.layout.held:
                    if key[0] in models and self.writes(*key):
                        self.optimizers[key].gather(self.communicator)

    # ------------------------------------------------------------ metrics

    def objectives(self) -> dict[str, Objective]:
        """Return trained role -> objective without statistics, in table order."""
        objectives = self.algorithm.objectives()
        return {model: objectives[model] for model in self.layout.models}

    def _report(self, measured: list[TimedAction], start_ns: int, end_ns: int) -> None:
        busy = sum(step.end_ns - step.start_ns for step in measured if step.action.peer is None)
        self.step_seconds.append((end_ns - start_ns) / 1e9)
        self.bubble_seconds += (end_ns - start_ns - busy) / 1e9
        number = str(len(self.step_seconds) - 1)
        self._span("train/step", start_ns, end_ns, number=number, schedule=self.layout.table.method)
        for step in measured:
            name, of = name_of(step.action, self.layout.table), step.action
            self._span(name, step.start_ns, step.end_ns, stage=str(of.stage), microbatch=str(of.microbatch))

    @contextmanager
    def _measured(self, name: str) -> Iterator[Any]:
        start = time.time_ns()
        yield
        piece_finished()
        self._span(name, start, time.time_ns())
