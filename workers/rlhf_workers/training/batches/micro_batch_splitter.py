"""Splits the mini-batches of a job as its manifest says, and decides whether samples share prompts.

Rule: a split depends on the manifest, the layout, the shapes of all trained models and the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_planner.training_flops import LEAST_SHARING_GAIN, active_parameters, attention_width, training_flops
from rlhf_planner.transformer_shape import shape_of
from rlhf_workers.training.batches.token_budget import MicroBatchPlan, split_minibatch
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout


@dataclass(frozen=True)
class ModelOperations:
    """Sizes of a model that decide its operations; see `training_flops`."""

    parameters: float
    width: float

    @classmethod
    def on_all_ranks(
        cls, configs: Mapping[str, Any], models: Sequence[str], communicator: Communicator, ranks: int,
        device: torch.device,
    ) -> "dict[str, ModelOperations]":  # fmt: skip
        """Return those of all trained models, from the configurations of this rank's. All ranks must call it
        together."""
        sizes = torch.zeros(len(models), 2, dtype=torch.float64, device=device)
        for place, model in enumerate(models):
            if model in configs:
                shape = shape_of(configs[model].to_dict())
                sizes[place, 0], sizes[place, 1] = active_parameters(shape), attention_width(shape)
        communicator.all_reduce_max(sizes, tuple(range(ranks)))
        return {model: cls(*of_model) for model, of_model in zip(models, sizes.tolist(), strict=True)}


class MicroBatchSplitter:
    """The split of a job's mini-batches."""

    def __init__(self, spec: RLHFJobSpec, operations: Mapping[str, ModelOperations]) -> None:
        """`operations`: of every trained model; only `Auto` reads them."""
        self._training, self._together = spec.training, spec.algorithm.fields.samples_per_unit
        self._operations = operations

    def split(
        self, layout: RankLayout, samples: list[int], batch: TrainingBatch, *, bounded: bool = True
    ) -> MicroBatchPlan:
        """Return the micro-batches of one mini-batch. `bounded`: whether `microBatchTokens` applies."""
        limit = self._training.micro_batch_tokens if bounded else None
        packing, mode = self._training.packing, self._training.shared_prompts
        plan = partial(split_minibatch, layout, samples, batch.lengths, self._together, limit, packing)
        if mode == "Disabled":
            return plan()
        shared = plan(batch.prompt_table)
        if mode == "Enabled":
            return shared
        whole = plan()
        gain = self.flops(whole, batch.lengths) / self.flops(shared, batch.lengths)
        return shared if gain >= LEAST_SHARING_GAIN else whole

    def flops(self, plan: MicroBatchPlan, lengths: Sequence[int]) -> float:
        """Return the predicted operations of all models on the rows of a packed plan."""
        total = 0.0
        for model, replicas in plan.splits.items():
            row = [segment for cells in replicas for cell in cells for segment in plan.row(cell, lengths)]
            tokens, pairs = sum(segment.tokens for segment in row), sum(segment.pairs for segment in row)
            of_model = self._operations[model]
            total += training_flops(of_model.parameters, of_model.width, tokens, pairs)
        return total
