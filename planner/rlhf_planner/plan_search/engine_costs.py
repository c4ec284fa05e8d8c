"""Costs of a generation worker by its tensor size, for the simulation of a rollout.

Without a profile it is the roofline of `inter_stage`. Two sums per layer of a tensor group are added: their latency to
every step, and their bytes to every row. A profile of another tensor size is scaled by the roofline, batch by batch.
Scoring is done on as many devices as a scoring worker has.
Pure; must never write a second roofline.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.inter_stage.roofline import ModelShape, assumed_costs
from rlhf_planner.plan_search.communication import all_reduce_seconds
from rlhf_planner.plan_search.cost_figures import FigureSource, PlanCosts, weakest
from rlhf_planner.plan_search.workload import ModelFacts, Workload

ENGINE_SUMS = 2
"""Sums per layer in a tensor group of a forward pass."""


def engine_costs(
    workload: Workload, costs: PlanCosts, tensor: int, max_batch_size: int, scoring_devices: int
) -> tuple[StageCosts, FigureSource]:
    """Return the costs of a worker of `tensor` devices that decodes so many samples, and their source."""
    rooftop = _rooftop(workload, costs, tensor, max_batch_size, scoring_devices)
    profile = costs.engine
    if profile is None:
        links = [costs.link(tensor).source] if tensor > 1 else []
        return rooftop, weakest((costs.device_source, *links))
    measured = replace(profile.costs, max_batch_size=max_batch_size)
    if tensor == profile.tensor:
        return measured, profile.source
    base = _rooftop(workload, costs, profile.tensor, max_batch_size, scoring_devices)
    links = [costs.link(max(tensor, profile.tensor)).source]
    return replace(measured, decode=_scaled(measured, base, rooftop), steps=()), weakest((profile.source, *links))


def _rooftop(
    workload: Workload, costs: PlanCosts, tensor: int, max_batch_size: int, scoring_devices: int
) -> StageCosts:
    policy, width = workload.policy, workload.value_bytes
    scorers = [_shape(model, width) for model in workload.scorers]
    device = costs.device
    if tensor > 1:
        latency = ENGINE_SUMS * math.log2(tensor) * 2 * costs.link(tensor).latency.value
        device = replace(device, layer_seconds=device.layer_seconds + latency)
    replays = workload.spec.deterministic
    engine = assumed_costs(_shape(policy, width), scorers, device, tensor, max_batch_size, replays=replays)
    scoring = assumed_costs(
        _shape(policy, width), scorers, costs.device, scoring_devices, max_batch_size, replays=replays
    )
    engine = replace(engine, score=scoring.score, wake_seconds=scoring.wake_seconds)
    if workload.spec.deterministic:
        engine = replace(engine, score_batch=1)
    if tensor == 1:
        return engine
    link, lines = costs.link(tensor), engine.decode
    free = replace(link, latency=replace(link.latency, value=0.0))  # each step has its latency already
    row = ENGINE_SUMS * policy.layers * all_reduce_seconds(policy.hidden * width, tensor, free)
    base = tuple(seconds + row * batch for batch, seconds in zip(lines.batches, lines.base, strict=True))
    return replace(engine, decode=replace(lines, base=base))


def _shape(model: ModelFacts, width: int) -> ModelShape:
    return ModelShape(model.size.parameters, model.layers, model.size.cache_values_per_token * width, width)


def _scaled(measured: StageCosts, own: StageCosts, other: StageCosts) -> DecodeLines:
    """Return the observed steps times the roofline of the `other` tensor size relative to that of the `own`."""
    (base, slope), (own_base, own_slope), (other_base, other_slope) = (
        stage.step_tables for stage in (measured, own, other)
    )
    batches = other.decode.batches
    return DecodeLines(
        batches,
        tuple(float(base[batch] * other_base[batch] / own_base[batch]) for batch in batches),
        tuple(float(slope[batch] * other_slope[batch] / own_slope[batch]) for batch in batches),
    )
