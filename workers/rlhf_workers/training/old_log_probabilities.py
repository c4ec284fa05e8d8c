"""Log-probabilities of an iteration's sampled tokens by the training ranks, before the first of its steps.

The policy goes once over the batch, by a table of forwards alone that the executor of training runs on the same ranks,
one mini-batch at a time. Micro-batches are those of the first epoch: where nothing has been trained yet, training
computes the same numbers again. Every token is told by one rank alone, the first of its tensor and its context group,
so the sum over ranks only adds zeros, and all ranks get the same bits. Nothing is kept for a backward, and no weight,
gradient or statistic changes. A token that was carried from an earlier iteration was drawn by weights that are gone.
Its ratio is against what drew it, by the engine's number, unless a correction weighs it by the ratio of these weights
to those.
"""

import time
from collections.abc import Generator, Mapping
from typing import Final

import torch

from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJobSpec
from rlhf_planner.schedule.forward_only import forward_only
from rlhf_workers.precision import shared_casts
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.communicator import Communicator
from rlhf_workers.training.context_group import context_group
from rlhf_workers.training.executor import execute
from rlhf_workers.training.minibatches import epoch_order, mini_batches
from rlhf_workers.training.pipeline_stage import PipelineStage
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.stage_work import StageWork
from rlhf_workers.training.time_marks import TimeMarks
from rlhf_workers.training.token_bounds import Dealt, deal
from rlhf_workers.training.trained_tokens import token_log_probabilities
from rlhf_workers.training.training_batch import OLD_FIELD, MicroBatch, TrainingBatch, micro_batch

SPAN: Final = "train/old-log-probabilities"
"""Of one mini-batch."""


class OldLogProbabilities:
    """The pass of one rank."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        policy: str,
        stages: Mapping[tuple[str, int], PipelineStage],
        communicator: Communicator,
        device: torch.device,
        compute: torch.dtype,
        time_marks: TimeMarks,
        span: SpanSink,
    ) -> None:
        """`policy`: role of the model that sampled; `stages`: all that this rank holds."""
        self._spec, self._policy, self._communicator, self._span = spec, policy, communicator, span
        self._device, self._compute, self._time_marks = device, compute, time_marks
        self._together = spec.algorithm.fields.samples_per_unit
        self._held = {stage: module for (model, stage), module in stages.items() if model == policy}

    def added_to(
        self, iteration: int, batch: TrainingBatch, layout: RankLayout
    ) -> Generator[None, None, TrainingBatch]:
        """Return the batch with OLD_FIELD, a mini-batch per step of the iterator. All ranks must call it together."""
        training = self._spec.training
        result = torch.zeros(batch.mask.shape)
        order = epoch_order(self._spec.seed, iteration, 0, len(batch.prompts), self._together)
        for number, rows in enumerate(mini_batches(order, self._spec.algorithm.fields.mini_batch_size)):
            if not batch.mask[rows].any():  # every sample abstained, so none of them is trained on
                continue
            start = time.time_ns()
            dealt = deal(layout, rows, batch.lengths, self._together, training.micro_batch_tokens, training.packing)
            table = forward_only(dealt.layout.table, self._policy)
            work, found = self._mini_batch(batch, dealt)
            with shared_casts(self._device, self._compute):
                row, marks = table.rows[layout.local], self._time_marks
                places = {"first_rank": layout.first_rank, "apart": layout.tensor}
                execute(row, work, self._communicator, time_marks=marks, forward_only=True, **places)
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
        """Return them with the engine's own of tokens that earlier weights drew: a ratio to the present weights would
        take those for what drew them. With a correction they stay, as it makes up for all of that difference."""
        if batch.stale is None or self._spec.algorithm.fields.corrects_mismatch:
            return old
        return torch.where(batch.stale, batch.fields[SAMPLED_FIELD], old)

    def _mini_batch(
        self, batch: TrainingBatch, dealt: Dealt
    ) -> tuple[dict[int, StageWork], dict[tuple[int, ...], torch.Tensor]]:
        """Return this rank's work by pipeline index, and where the log-probabilities [n] of each micro-batch's samples
        will be."""
        work: dict[int, StageWork] = {}
        found: dict[tuple[int, ...], torch.Tensor] = {}
        layout = dealt.layout
        for index in layout.pipelines(self._policy) if self._held else ():
            chosen = dealt.splits[self._policy][layout.replica(index)]
            group = context_group(layout, self._communicator)
            cells = [micro_batch(batch, samples, {}, dealt.packed, group) for samples in chosen]
            ending = _Ending(self._spec.rollout.temperature, [tuple(samples) for samples in chosen], found)
            microbatches = [cell.to(self._device) for cell in cells]
            work[index] = StageWork(layout.stages(self._policy), self._held, microbatches, ending, self._compute)
        return work, found


class _Ending:
    """What the last stage does with its states: keeps the log-probabilities of the micro-batches, which come in
    order."""

    def __init__(
        self, temperature: float, chosen: list[tuple[int, ...]], found: dict[tuple[int, ...], torch.Tensor]
    ) -> None:
        self._temperature, self._coming, self._found = temperature, iter(chosen), found

    def __call__(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        log_p, _ = token_log_probabilities(stage, hidden, microbatch, self._temperature)
        self._found[next(self._coming)] = log_p
        return log_p
