"""Log-probabilities of an iteration's sampled tokens on the training ranks, before the iteration's first step.

The policy runs once over the mini-batches with a token to train on. One rank contributes each token, so the sum over
ranks is exact. Tokens sampled with earlier weights keep the engine's log-probability, unless a mismatch correction
weights them.
"""

import time
from collections.abc import Generator, Mapping
from typing import Final

import torch

from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJobSpec
from rlhf_planner.schedule.forward_only import forward_only
from rlhf_workers.models.precision import shared_casts
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.batches.micro_batch_splitter import MicroBatchSplitter
from rlhf_workers.training.batches.minibatches import epoch_order, mini_batches
from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.batches.training_batch import OLD_FIELD, MicroBatch, TrainingBatch, micro_batch
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.context_group import context_group
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.device_timers import DeviceTimers
from rlhf_workers.training.schedule.executor import execute
from rlhf_workers.training.stages.last_stage_outputs import token_log_probabilities
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.stages.stage_work import StageWork

SPAN: Final = "train/old-log-probabilities"
"""Span name of one mini-batch."""


class OldLogProbabilities:
    """The policy's pass on one rank."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        policy: str,
        stages: Mapping[tuple[str, int], PipelineStage],
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        device_timers: DeviceTimers,
        span: SpanSink,
        splitter: MicroBatchSplitter,
    ) -> None:
        """`policy`: role of the model that sampled; `stages`: all stages of this rank."""
        self._spec, self._policy, self._communicator, self._span = spec, policy, communicator, span
        self._device, self._compute, self._device_timers = device, compute, device_timers
        self._samples_per_unit, self._splitter = spec.algorithm.fields.samples_per_unit, splitter
        self._held = {stage: module for (model, stage), module in stages.items() if model == policy}

    def added_to(
        self, iteration: int, batch: TrainingBatch, layout: RankLayout
    ) -> Generator[None, None, TrainingBatch]:
        """Return the batch with OLD_FIELD, one mini-batch per step of the iterator. All ranks must call it together."""
        result = torch.zeros(batch.mask.shape)
        order = epoch_order(self._spec.seed, iteration, 0, len(batch.prompts), self._samples_per_unit)
        for number, rows in enumerate(mini_batches(order, self._spec.algorithm.fields.mini_batch_size)):
            if not batch.mask[rows].any():  # there is no token to train on
                continue
            start = time.time_ns()
            plan = self._splitter.split(layout, rows, batch)
            table = forward_only(plan.layout.table, self._policy)
            work, found = self._mini_batch(batch, plan)
            with shared_casts(self._device, self._compute):
                row, marks = table.rows[layout.local], self._device_timers
                places = {"first_rank": layout.first_rank, "apart": layout.tensor}
                execute(row, work, self._communicator, device_timers=marks, forward_only=True, **places)
            for chosen, log_p in found.items() if layout.speaks(self._policy) else ():
                part = torch.zeros(len(chosen), result.shape[1])
                part[batch.mask[list(chosen)]] = log_p.cpu()
                result[list(chosen)] = part
            self._span(SPAN, start, time.time_ns(), number=str(number), schedule=table.method)
            yield
        whole = result.to(self._device)
        self._communicator.all_reduce_sum(whole, tuple(range(layout.world)))
        return batch.with_fields(**{OLD_FIELD: self._against_who_drew(batch, whole.cpu())})

    def _against_who_drew(self, batch: TrainingBatch, old: torch.Tensor) -> torch.Tensor:
        """Return `old` with the engine's values for tokens sampled with earlier weights; with a correction, return
        `old`.
        """
        if batch.stale is None or self._spec.algorithm.fields.corrects_mismatch:
            return old
        return torch.where(batch.stale, batch.fields[SAMPLED_FIELD], old)

    def _mini_batch(
        self, batch: TrainingBatch, plan: MicroBatchPlan
    ) -> tuple[dict[int, StageWork], dict[tuple[int, ...], torch.Tensor]]:
        """Return this rank's work by pipeline index, and a dict that the work fills: samples of a micro-batch ->
        log-probabilities [n]."""
        work: dict[int, StageWork] = {}
        found: dict[tuple[int, ...], torch.Tensor] = {}
        layout = plan.layout
        for index in layout.pipelines(self._policy) if self._held else ():
            chosen = plan.splits[self._policy][layout.replica(index)]
            group = context_group(layout, self._communicator)
            cells = [micro_batch(batch, samples, {}, plan.packed, group, plan.prompts) for samples in chosen]
            ending = _Ending(self._spec.rollout.temperature, [tuple(samples) for samples in chosen], found)
            microbatches = [cell.to(self._device) for cell in cells]
            work[index] = StageWork(layout.stages(self._policy), self._held, microbatches, ending, self._compute)
        return work, found


class _Ending:
    """Ending of the last stage: stores the log-probabilities of the micro-batches, which come in order."""

    def __init__(
        self, temperature: float, chosen: list[tuple[int, ...]], found: dict[tuple[int, ...], torch.Tensor]
    ) -> None:
        self._temperature, self._coming, self._found = temperature, iter(chosen), found

    def __call__(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        log_p, _ = token_log_probabilities(stage, hidden, microbatch, self._temperature)
        self._found[next(self._coming)] = log_p
        return log_p
