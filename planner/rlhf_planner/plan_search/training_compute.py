"""Seconds in which one rank computes one layer, the embedding, or the head of a micro-batch: forward and backward.

A profile counts where there is one, else the roofline: 6 operations per active parameter and token (4 with adapters),
and 6 per width and squared length for causal attention. Must never count communication.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rlhf_planner.plan_search.cost_figures import NOTHING, CostFigure, LayerProfile, ModelPart, PlanCosts
from rlhf_planner.plan_search.workload import MicroBatchSize, ModelFacts
from rlhf_planner.training_flops import training_flops

PASSES = 3
"""Passes over a layer's weights: forward, gradient of inputs, gradient of weights."""
RECOMPUTED = 4 / 3
"""Time with recomputed activations relative to the time without."""


def layer_seconds(
    model: ModelFacts,
    batch: MicroBatchSize,
    costs: PlanCosts,
    *,
    tensor: int = 1,
    context: int = 1,
    recompute: bool = False,
    adapters: bool = False,
    value_bytes: int = 2,
) -> CostFigure:
    """Return the seconds of one layer of a micro-batch on one of tensor x context ranks."""
    rooftop = _roofline(model, batch, costs, tensor, context, adapters, value_bytes)
    factor = RECOMPUTED if recompute else 1.0
    profile = _nearest(costs.layers, model.role, ModelPart.LAYER, tensor)
    if profile is None:
        return CostFigure(rooftop * factor * costs.compute.value, costs.compute_source)
    seconds = interpolated(profile.points, batch.tokens / context)
    if profile.tensor != tensor:
        seconds *= rooftop / _roofline(model, batch, costs, profile.tensor, context, adapters, value_bytes)
    return CostFigure(seconds * factor, profile.source)


def ends_seconds(
    model: ModelFacts, batch: MicroBatchSize, costs: PlanCosts, *, policy: bool, tensor: int = 1, context: int = 1
) -> tuple[CostFigure, CostFigure]:
    """Return the seconds of (embedding, head and loss) of a micro-batch on one of tensor x context ranks.

    Without a profile the embedding takes no time, and the head only that of the policy's products with a known
    vocabulary.
    """
    operations = 6 * model.table_parameters * batch.responses if policy else 0.0
    rooftop = operations / (tensor * context * costs.flops.value) * costs.compute.value
    embedding = _profiled(costs, model, ModelPart.EMBEDDING, batch.tokens / context, 1)
    head = _profiled(costs, model, ModelPart.HEAD, batch.responses / context, tensor)
    return embedding or NOTHING, head or CostFigure(rooftop, costs.compute_source)


def _profiled(costs: PlanCosts, model: ModelFacts, part: ModelPart, tokens: float, tensor: int) -> CostFigure | None:
    """Return the seconds of a part, which several tensor ranks divide; None without a profile."""
    profile = _nearest(costs.layers, model.role, part, tensor)
    if profile is None:
        return None
    return CostFigure(interpolated(profile.points, tokens) * profile.tensor / tensor, profile.source)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at `at`, at least 0: linear between points and beyond them; proportional to a single point."""
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    index = min(max(1, bisect_left([x for x, _ in points], at)), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return max(0.0, low + (high - low) * (at - left) / (right - left))


def _roofline(
    model: ModelFacts,
    batch: MicroBatchSize,
    costs: PlanCosts,
    tensor: int,
    context: int,
    adapters: bool,
    value_bytes: int,
) -> float:
    sizes = model.active_parameters, model.hidden, batch.tokens, batch.squares / 2
    operations = training_flops(*sizes, per_parameter=4 if adapters else 6)
    computed = operations / (tensor * context * costs.flops.value)
    read = PASSES * model.layer_parameters * value_bytes / (tensor * costs.memory_bandwidth.value)
    return max(computed, read) + PASSES * costs.layer_seconds.value


def _nearest(profiles: Sequence[LayerProfile], role: str, part: ModelPart, tensor: int) -> LayerProfile | None:
    """Return the profile of a role's part, of the largest tensor size up to `tensor`; without one, of the smallest
    above it.
    """
    own = [profile for profile in profiles if (profile.role, profile.part) == (role, part)]
    below = [profile for profile in own if profile.tensor <= tensor]
    if below:
        return max(below, key=lambda profile: profile.tensor)
    return min(own, key=lambda profile: profile.tensor, default=None)
