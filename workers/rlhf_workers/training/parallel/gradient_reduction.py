"""Sums over ranks of a mini-batch's gradients, norms and losses, between its backward passes and its optimizer step.

Rule: sum over data replicas first, then over a tensor group in which each rank has a part of a sum, then over the two
copies of a tied embedding. The backward itself sums gradients of sharded stages.
"""

from collections.abc import Collection, Mapping

import torch

from rlhf_workers.algorithms.objectives import Objective, Statistics
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.pipeline_stage import PipelineStage

Stages = Mapping[tuple[str, int], PipelineStage]
Optimizers = Mapping[tuple[str, int], StageOptimizer]


def sum_gradients(
    trained: Collection[str], layout: RankLayout, stages: Stages, optimizers: Optimizers, communicator: Communicator
) -> None:
    """Sum the gradients of the trained models, in place."""
    for model, stage in layout.local_stages:
        if model in trained and not optimizers[model, stage].over_data:
            holders, by_experts = layout.holders(model, stage), layout.by_experts(model, stage)
            optimizers[model, stage].sum_copies(communicator, holders, by_experts)
            optimizers[model, stage].sum_parts(communicator)
    for model in trained:
        last = layout.stages(model) - 1
        if last and any(stage.sums_embedding for (name, _), stage in stages.items() if name == model):
            _sum_embeddings(model, last, layout, stages, optimizers, communicator)


def _sum_embeddings(
    model: str, last: int, layout: RankLayout, stages: Stages, optimizers: Optimizers, communicator: Communicator
) -> None:
    """Sum the two copies of a tied embedding, on the first and the last stage."""

    def gradient(stage: int) -> torch.Tensor:
        return optimizers[model, stage].gradient(stages[model, stage].embedding)

    for ends in layout.ends(model):
        if ends[0] == ends[1] == layout.rank:
            first, other = gradient(0), gradient(last)
            first += other
            other.copy_(first)
        elif layout.rank in ends:
            communicator.all_reduce_sum(gradient(0 if layout.rank == ends[0] else last), ends)


def all_reduce_norms(
    objectives: Mapping[str, Objective],
    before: Mapping[str, Statistics],
    layout: RankLayout,
    optimizers: Optimizers,
    communicator: Communicator,
) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
    """Return each model's loss since its statistics were `before`, and the squared gradient norm of each stage, the
    same on all ranks.

    Losses are summed over replicas; one rank of each replica contributes.
    """
    slots = [(model, stage) for model in layout.models for stage in range(layout.stages(model))]
    device = next(iter(optimizers.values())).gradients.device
    sums = torch.zeros(len(slots) + len(objectives), dtype=torch.float64, device=device)
    for place, key in enumerate(slots):
        if key in optimizers and (layout.writes(*key) or optimizers[key].over_data):
            sums[place] = optimizers[key].norm_squared()
    for place, (model, objective) in enumerate(objectives.items(), len(slots)):
        if layout.speaks(model):
            sums[place] = objective.statistics["loss"] - before[model]["loss"]
    communicator.all_reduce_sum(sums, tuple(range(layout.world)))
    values = sums.tolist()
    losses = dict(zip(objectives, values[len(slots) :], strict=True))
    return losses, dict(zip(slots, values, strict=False))
