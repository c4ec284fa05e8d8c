"""Seconds of collective operations and transfers, from bytes, ranks and a link.

A ring moves (n-1)/n of the bytes in each of its halves, and n ranks wait for about log2(n) messages.
"""

from __future__ import annotations

import math

from rlhf_planner.plan_search.cost_figures import LinkCosts


def all_gather_seconds(count: float, ranks: int, link: LinkCosts) -> float:
    """Return the seconds in which every rank gets all of `count` bytes that the ranks hold in equal parts.

    A reduce-scatter of as many bytes takes as long.
    """
    if ranks < 2:
        return 0.0
    return (ranks - 1) / ranks * count / link.bandwidth.value + math.log2(ranks) * link.latency.value


def all_reduce_seconds(count: float, ranks: int, link: LinkCosts) -> float:
    """Return the seconds in which every rank gets the sum of all ranks' `count` bytes."""
    return 2 * all_gather_seconds(count, ranks, link)


def all_to_all_seconds(count: float, ranks: int, link: LinkCosts) -> float:
    """Return the seconds in which every rank sends its `count` bytes to all ranks in equal parts."""
    if ranks < 2:
        return 0.0
    return (ranks - 1) / ranks * count / link.bandwidth.value + link.latency.value


def transfer_seconds(count: float, link: LinkCosts) -> float:
    """Return the seconds of sending `count` bytes from one rank to another."""
    return count / link.bandwidth.value + link.latency.value
