"""Simulates scoring: one first-come-first-served queue, and workers that join it at different times.

A free worker takes a fair share of the waiting samples, at most one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats


class SimulatedScoring(NamedTuple):
    """Result of the simulated queue."""

    end: float
    busy: dict[int, float]
    """Worker -> seconds of scoring."""
    passes: list[tuple[int, float, float, int]]
    """(worker, start, end, number of samples) of each pass."""


def score(arrivals: Floats, tokens: Floats, available: Mapping[int, float], costs: StageCosts) -> SimulatedScoring:
    """Simulate scoring. Raises ValueError without workers.

    `arrivals` float64 [n] is the time from which each sample may be scored, `tokens` float64 [n] its length with the
    prompt. `available` maps each worker to the time at which it joins.
    """
    if not available:
        raise ValueError("no worker scores: there is no dedicated inference worker and no released worker")
    order = np.argsort(arrivals, kind="stable")
    when = arrivals[order].tolist()
    total = np.concatenate([[0.0], tokens[order].cumsum()]).tolist()
    free = [(moment, worker) for worker, moment in available.items()]
    heapq.heapify(free)
    most, workers, size = costs.score_batch, len(free), len(when)
    setup, a_sample, a_token = costs.score_parts
    busy = dict.fromkeys(available, 0.0)
    passes: list[tuple[int, float, float, int]] = []
    first = arrived = 0
    end = 0.0
    while first < size:
        moment, worker = free[0]
        start = max(moment, when[first])
        while arrived < size and when[arrived] <= start:
            arrived += 1
        taken = min(most, max(1, (arrived - first) // workers))
        seconds = setup + taken * a_sample + (total[first + taken] - total[first]) * a_token
        heapq.heapreplace(free, (start + seconds, worker))
        busy[worker] += seconds
        passes.append((worker, start, start + seconds, taken))
        first += taken
        end = max(end, start + seconds)
    return SimulatedScoring(end, busy, passes)
