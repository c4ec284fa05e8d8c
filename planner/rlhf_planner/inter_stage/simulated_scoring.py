"""When the last sample is scored: one queue, first come first served, and workers that join it at different times.

Rule: a worker that is free takes what waits, its fair share of it and a pass's worth at most, and is busy for as long
as that pass takes. Exact, one event per pass. Dispatch deals what waits longest first, so that passes are alike;
here samples that came together are in the order of the batch, which is as even on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats


class SimulatedScoring(NamedTuple):
    """How the queue was worked off."""

    end: float
    busy: dict[int, float]
    """Seconds by worker."""
    passes: list[tuple[int, float, float, int]]
    """(worker, start, end, samples)."""


def score(arrivals: Floats, tokens: Floats, available: Mapping[int, float], costs: StageCosts) -> SimulatedScoring:
    """Return how scoring goes: `arrivals` float64 [n] is when each sample may be scored, `tokens` float64 [n] its
    length, prompt included.

    `available` says when each worker joins. Raises ValueError when there is nobody to score.
    """
    if not available:
        raise ValueError("nobody scores: no dedicated inference worker and none that is released")
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
