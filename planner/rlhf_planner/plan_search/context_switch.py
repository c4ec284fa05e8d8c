"""Seconds in which colocated roles take turns on their devices: offloads and onloads of one iteration.

The rank moves 12 bytes per parameter, or 4 if its moments are in host memory. On a CPU nothing moves. Caches are not
counted.
"""

from __future__ import annotations

from rlhf_planner.device_memory import FLOAT32_BYTES, OPTIMIZER_BYTES
from rlhf_planner.plan_search.cost_figures import CostFigure, PlanCosts

DIRECTIONS = 2
"""Moves of each side: to the host and back."""


def switch_seconds(
    rank_parameters: float, policy_bytes: float, costs: PlanCosts, *, moments_in_host: bool, on_gpus: bool
) -> CostFigure:
    """Return the seconds of all moves of one iteration on one device with a rank."""
    if not on_gpus:
        return CostFigure(0.0, costs.host_bandwidth.source)
    rank = FLOAT32_BYTES + (0 if moments_in_host else OPTIMIZER_BYTES)
    count = DIRECTIONS * (rank * rank_parameters + policy_bytes)
    return CostFigure(count / costs.host_bandwidth.value, costs.host_bandwidth.source)
