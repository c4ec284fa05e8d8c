"""Costs of a generation worker by its tensor size, for the simulation of a rollout.

A profile of another tensor size is scaled by the roofline, without its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_planner.inter_stage.costs import StageCosts, score_batch_of
from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.inter_stage.roofline import ModelShape, assumed_costs
from rlhf_planner.plan_search.communication import all_reduce_seconds
from rlhf_planner.plan_search.cost_figures import FigureSource, PlanCosts, weakest
from rlhf_planner.plan_search.workload import ModelFacts, Workload

ENGINE_SUMS = 2
"""Sums over a tensor group, per layer of a forward pass."""


def engine_costs(
    workload: Workload, costs: PlanCosts, tensor: int, max_batch_size: int, scoring_devices: int
) -> tuple[StageCosts, FigureSource]:
    """Return the costs of a worker of `tensor` devices that decodes so many samples, and their source."""
    rooftop = _rooftop(workload, costs, tensor, max_batch_size, scoring_devices)
    profile = costs.engine
    if profile is None:
        links = [costs.link(tensor).source] if tensor > 1 else []
        lines = rooftop.decode
        base = tuple(
            seconds + sum_seconds(workload, costs, tensor, batch)
            for batch, seconds in zip(lines.batches, lines.base, strict=True)
        )
        return replace(rooftop, decode=replace(lines, base=base)), weakest((costs.device_source, *links))
    measured = replace(profile.costs, max_batch_size=max_batch_size)
    if tensor == profile.tensor:
        return measured, profile.source
    own = _rooftop(workload, costs, profile.tensor, max_batch_size, scoring_devices)
    sums = [
        (sum_seconds(workload, costs, profile.tensor, batch), sum_seconds(workload, costs, tensor, batch))
        for batch in rooftop.decode.batches
    ]
    source = weakest((profile.source, costs.link(max(tensor, profile.tensor)).source))
    return replace(measured, decode=_scaled(measured, own, rooftop, sums), steps=()), source


def sum_seconds(workload: Workload, costs: PlanCosts, tensor: int, rows: int) -> float:
    """Return the seconds in which a tensor group sums in one decode step of so many samples."""
    policy = workload.policy
    states = rows * policy.hidden * workload.value_bytes
    return ENGINE_SUMS * policy.layers * all_reduce_seconds(states, tensor, costs.link(tensor))


def _rooftop(
    workload: Workload, costs: PlanCosts, tensor: int, max_batch_size: int, scoring_devices: int
) -> StageCosts:
    """Return the roofline of a worker without its sums, which scores on so many devices."""
    policy, width, spec = workload.policy, workload.value_bytes, workload.spec
    scorers = [_shape(model, width) for model in workload.scorers]
    engine, scoring = (
        assumed_costs(
            _shape(policy, width), scorers, costs.device, devices, max_batch_size,
            replays=spec.replays_tokens, score_batch=score_batch_of(spec),
        )
        for devices in (tensor, scoring_devices)
    )  # fmt: skip
    return replace(engine, score=scoring.score, wake_seconds=scoring.wake_seconds)


def _shape(model: ModelFacts, width: int) -> ModelShape:
    return ModelShape(model.size.parameters, model.layers, model.size.cache_values_per_token * width, width)


def _scaled(
    measured: StageCosts, own: StageCosts, other: StageCosts, sums: Sequence[tuple[float, float]]
) -> DecodeLines:
    """Return observed steps without their sums, times the roofline of `other` over that of `own`, with other sums.

    `sums` are the seconds of (the observed sums, the other sums) for each batch of `other`.
    """
    (base, slope), (own_base, own_slope), (other_base, other_slope) = (
        stage.step_tables for stage in (measured, own, other)
    )
    batches = other.decode.batches
    bases = [
        max(0.0, float(base[batch]) - before) * float(other_base[batch] / own_base[batch]) + after
        for batch, (before, after) in zip(batches, sums, strict=True)
    ]
    slopes = [float(slope[batch] * other_slope[batch] / own_slope[batch]) for batch in batches]
    return DecodeLines(batches, tuple(bases), tuple(slopes))
