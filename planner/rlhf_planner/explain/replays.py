"""Replays a recorded iteration, unchanged or with one change. Rule: pure."""

import heapq
from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.decode_costs import DecodeCosts
from rlhf_planner.explain.iteration_profile import SampleFacts

TOLERANCE: Final = 0.15
"""Largest relative difference between a replay and the measurement."""
PREFETCH_SHARE: Final = 8
"""A worker gets 1/8 more samples than it decodes at once, at least one more, as in the coordinator's dispatch."""


def meets(replayed: float, measured: float) -> bool:
    """Return whether a replay matches the measurement within TOLERANCE."""
    return measured > 0 and abs(replayed / measured - 1) <= TOLERANCE


class _Worker:
    """One generation worker in a replay."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.clock = 0.0
        self.step = 0.0
        self.rows: list[tuple[float, int]] = []
        """Heap of (step at which the row ends, sample)."""
        self.keys = 0.0
        """Sum of the keys of all rows, extrapolated to step 0. Each row gains one key per step."""
        self.waiting: list[int] = []


class _Generation:
    """State of a replay of generation."""

    def __init__(self, samples: SampleFacts, costs: DecodeCosts, rows: int, paces: Sequence[float]) -> None:
        self.samples, self.costs, self.limit = samples, costs, rows
        self.workers = [_Worker(pace) for pace in paces]
        self.finish = [0.0] * len(samples.responses)
        self.next = 0

    def run(self) -> list[float]:
        """Return the time at which each sample is finished."""
        capacity = self.limit + max(1, self.limit // PREFETCH_SHARE)
        size = len(self.finish)
        while self.next < min(size, capacity * len(self.workers)):
            self.workers[self.next % len(self.workers)].waiting.append(self.next)
            self.next += 1
        events: list[tuple[float, int]] = []
        for index, worker in enumerate(self.workers):
            self._admit(worker)
            if worker.rows:
                heapq.heappush(events, (self._ends(worker), index))
        while events:
            moment, index = heapq.heappop(events)
            worker = self.workers[index]
            self._finish(worker, moment)
            if self.next < size:
                worker.waiting.append(self.next)
                self.next += 1
            self._admit(worker)
            if worker.rows:
                heapq.heappush(events, (self._ends(worker), index))
        return self.finish

    def _admit(self, worker: _Worker) -> None:
        while worker.waiting and len(worker.rows) < self.limit:
            sample = worker.waiting.pop(0)
            heapq.heappush(worker.rows, (worker.step + self.samples.responses[sample], sample))
            worker.keys += self.samples.prompts[sample] - worker.step

    def _ends(self, worker: _Worker) -> float:
        rows, taken = len(worker.rows), worker.rows[0][0] - worker.step
        keys = worker.keys / rows + worker.step + max(0.0, taken - 1) / 2
        return worker.clock + taken * worker.pace * self.costs.seconds(rows, keys)

    def _finish(self, worker: _Worker, moment: float) -> None:
        end, sample = heapq.heappop(worker.rows)
        worker.keys -= self.samples.prompts[sample] - (end - self.samples.responses[sample])
        worker.step, worker.clock = end, moment
        self.finish[sample] = moment


def generation(samples: SampleFacts, costs: DecodeCosts, rows: int, paces: Sequence[float]) -> list[float]:
    """Return the time at which each sample is finished, in seconds from the first lease.

    `paces` has one pace per worker.
    """
    return _Generation(samples, costs, rows, paces).run()


def scoring_rate(samples: SampleFacts) -> float:
    """Return the mean seconds per score over the time in which samples waited to be scored."""
    return rate_of(samples.finished, samples.scored)


def rate_of(finished: Sequence[float], scored: Sequence[float]) -> float:
    """Return the mean seconds per score while samples waited. Needs at least one sample."""
    busy, until = 0.0, 0.0
    for arrival, end in sorted(zip(finished, scored, strict=True)):
        start = max(arrival, until)
        if end > start:
            busy += end - start
            until = end
    return busy / len(scored)


def scoring_latency(samples: SampleFacts) -> float:
    """Return the minimum seconds from a finished response to its last score."""
    return latency_of(samples.finished, samples.scored)


def latency_of(finished: Sequence[float], scored: Sequence[float]) -> float:
    """Return the minimum seconds from a finished response to its last score.

    Needs the moments of at least one sample.
    """
    return min(max(0.0, end - arrival) for arrival, end in zip(finished, scored, strict=True))


def scoring_end(arrivals: Sequence[float], apart: float, latency: float) -> float:
    """Return when the last sample is scored with scores at least `apart` seconds apart and `latency` after arrivals."""
    end = 0.0
    for arrival in sorted(arrivals):
        end = max(end + apart, arrival + latency)
    return end
