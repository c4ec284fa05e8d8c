"""Seconds in which workers get the trained weights.

Every reader fetches each published model once. Encoded differences of weights are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_planner.plan_search.cost_figures import CostFigure, PlanCosts, weakest


@dataclass(frozen=True)
class Readers:
    """Workers of one kind that fetch weights."""

    count: int
    devices: int
    """Devices of each worker, whose links it has."""
    weight_bytes: float
    """Bytes that each worker fetches."""


def publish_seconds(readers: list[Readers], holders: int, devices: int, costs: PlanCosts) -> CostFigure:
    """Return the seconds until all readers have the weights of `holders` ranks, in a job of so many devices."""
    link = costs.link(devices)
    served = sum(reader.count * reader.weight_bytes for reader in readers) / (holders * link.bandwidth.value)
    slowest = max(
        (reader.weight_bytes / (reader.devices * link.bandwidth.value) for reader in readers if reader.count),
        default=0.0,
    )
    copied = max(
        (reader.weight_bytes / (reader.devices * costs.host_bandwidth.value) for reader in readers if reader.count),
        default=0.0,
    )
    seconds = max(served, slowest, copied) + link.latency.value
    return CostFigure(seconds, weakest((link.source, costs.host_bandwidth.source)))
