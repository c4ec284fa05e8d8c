"""Simulates when every sample is finished without moves: continuous batching on several workers.

A simulated step is one token of every row. A prefill stalls its worker.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.forecast import PREFETCH_SHARE, IterationSetup
from rlhf_planner.inter_stage.length_distribution import Ints


class Drained(NamedTuple):
    """A fixed set of rows decoded to their ends: row i ends at `finish[i]`, and rows end at `times`, after `steps`
    steps."""

    finish: Floats
    times: Floats
    steps: Floats


def drain(start: float, steps: Ints, context: Floats, costs: StageCosts) -> Drained:
    """Return when k rows end that start at `start` and need `steps` (int64 [k]) more steps; k is at most
    max_batch_size.

    `context` (float64 [k]) are their keys at the start.
    """
    base, slope = costs.token_tables
    order = np.argsort(steps, kind="stable")
    ends = steps[order].astype(np.float64)
    rows = np.arange(len(ends), 0, -1)
    taken = ends.copy()
    taken[1:] -= ends[:-1]
    own = context[order]
    beyond = own[::-1]
    keys = (np.maximum.accumulate(beyond) if costs.padded else beyond.cumsum() / rows[::-1])[::-1]
    first = keys + (ends - taken)
    times = start + np.cumsum(taken * base[rows] + slope[rows] * taken * (first + (taken - 1) / 2))
    finish = np.empty(len(ends))
    finish[order] = times
    return Drained(finish, times, ends)


@dataclass
class WorkerTimeline:
    """Decoding of one worker. At each of `times` it has made `steps` decode steps; linear in between."""

    clock: float = 0.0
    step: int = 0
    waiting: deque[int] = field(default_factory=deque)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (step at which the row ends, sample)."""
    relative: dict[int, float] = field(default_factory=dict)
    """Sample -> keys of its row extrapolated to step 0. A row gains one key per step."""
    keys: float = 0.0
    """Largest of these keys; without padding, their sum."""
    times: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def steps_at(self, moment: float) -> float:
        """Return the decode steps made by `moment`."""
        at = bisect_right(self.times, moment)
        if at == len(self.times):
            return self.steps[-1] if self.steps else 0.0
        return self.steps[0] if at == 0 else _between(moment, self.times, self.steps, at)

    def boundary(self, moment: float) -> tuple[float, int]:
        """Return (time, steps) of the first step boundary at or after `moment`; `moment` itself if the worker is idle
        by then."""
        if not self.times or moment >= self.times[-1]:
            return moment, int(self.steps[-1]) if self.steps else 0
        step = math.ceil(self.steps_at(moment) - 1e-9)
        at = bisect_left(self.steps, step)
        return max(moment, _between(step, self.steps, self.times, at) if at else self.times[0]), step

    @property
    def busy(self) -> float:
        """Seconds of decoding and prefilling."""
        return self.times[-1] if self.times else 0.0


def _between(value: float, points: Sequence[float], values: Sequence[float], at: int) -> float:
    """Interpolate linearly between the points at - 1 and at."""
    share = (value - points[at - 1]) / (points[at] - points[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])


@dataclass
class SimulatedGeneration:
    """An iteration's generation without moves."""

    lengths: Ints
    prompts: Floats
    worker: Ints
    """[n] worker of each sample."""
    begun: Ints
    """[n] decode step of its worker at which each sample started."""
    finish: Floats
    """[n] seconds until each sample is finished."""
    queue_empty: float
    """Time at which the last sample was leased to a worker."""
    timelines: tuple[WorkerTimeline, ...]

    @property
    def end(self) -> float:
        """Time at which the last sample is finished."""
        return float(self.finish.max())

    def threshold_time(self, threshold: int) -> float:
        """Return the time from which at most `threshold` samples are unfinished and none is queued, in seconds."""
        size = len(self.finish)
        if threshold >= size:
            return self.queue_empty
        when = np.partition(self.finish, size - threshold - 1)[size - threshold - 1]
        return max(self.queue_empty, float(when))


def generate(lengths: Ints, setup: IterationSetup, costs: StageCosts) -> SimulatedGeneration:
    """Simulate the generation of all samples without fusion.

    `lengths` int64 [batch] are the tokens of each response, at least 1.
    """
    size, workers = setup.batch, setup.generation_workers
    run = _ContinuousBatching(lengths, setup, costs)
    capacity = costs.max_batch_size + max(1, costs.max_batch_size // PREFETCH_SHARE)
    handed = min(size, workers * capacity)
    for index, timeline in enumerate(run.timelines):
        timeline.waiting.extend(range(index, handed, workers))
        run.worker[index:handed:workers] = [index] * len(timeline.waiting)
        run.admit(timeline)
    run.refill(handed)
    for timeline in run.timelines:
        run.drain(timeline)
    worker, begun = np.array(run.worker), np.array(run.begun)
    return SimulatedGeneration(
        lengths, run.prompts, worker, begun, np.array(run.finish), run.queue_empty, tuple(run.timelines)
    )


class _ContinuousBatching:
    """State while `generate` runs."""

    def __init__(self, lengths: Ints, setup: IterationSetup, costs: StageCosts) -> None:
        prompts: Floats = np.asarray(setup.prompts, dtype=np.float64)
        self.lengths, self.prompts, self.costs = lengths, prompts, costs
        self.worker, self.begun, self.finish = [0] * len(lengths), [0] * len(lengths), [0.0] * len(lengths)
        self.queue_empty = 0.0
        self.timelines = [WorkerTimeline() for _ in range(setup.generation_workers)]
        self._length, self._prompt = lengths.tolist(), prompts.tolist()
        self._base, self._slope = (table.tolist() for table in costs.token_tables)
        self._padded, self._rows, self._lines = costs.padded, costs.max_batch_size, setup.lines

    def admit(self, timeline: WorkerTimeline) -> None:
        """Fill free rows with waiting samples, after their prefill."""
        free = self._rows - len(timeline.rows)
        new = [timeline.waiting.popleft() for _ in range(min(free, len(timeline.waiting)))]
        if not new:
            return
        prompts = len({self._lines[sample] for sample in new}) if self._lines else len(new)
        stall = self.costs.prefill_seconds(prompts, sum(self._prompt[sample] for sample in new) / len(new))
        timeline.times += (timeline.clock, timeline.clock + stall)
        timeline.steps += (timeline.step, timeline.step)
        timeline.clock += stall
        for sample in new:
            self.begun[sample] = timeline.step
            heapq.heappush(timeline.rows, (timeline.step + self._length[sample], sample))
            keys = self._prompt[sample] - timeline.step
            timeline.keys = max(timeline.keys, keys) if self._padded and timeline.relative else timeline.keys + keys
            timeline.relative[sample] = keys

    def _end(self, timeline: WorkerTimeline) -> int:
        """Remove the row that ends first, record its end, and return its sample."""
        _, sample = heapq.heappop(timeline.rows)
        keys = timeline.relative.pop(sample)
        if not self._padded:
            timeline.keys -= keys
        elif keys >= timeline.keys:
            timeline.keys = max(timeline.relative.values(), default=0.0)
        self.finish[sample] = timeline.clock
        return sample

    def refill(self, handed: int) -> None:
        """Run the workers in the order of time while samples wait."""
        heap = [(self._next(timeline), index) for index, timeline in enumerate(self.timelines) if timeline.waiting]
        heapq.heapify(heap)
        while heap:
            moment, index = heapq.heappop(heap)
            timeline = self.timelines[index]
            timeline.step, timeline.clock = timeline.rows[0][0], moment
            while timeline.rows and timeline.rows[0][0] == timeline.step:
                self._end(timeline)
                if handed < len(self._length):
                    timeline.waiting.append(handed)
                    self.worker[handed] = index
                    self.queue_empty = moment
                    handed += 1
            self.admit(timeline)
            if timeline.waiting:
                heapq.heappush(heap, (self._next(timeline), index))

    def _next(self, timeline: WorkerTimeline) -> float:
        """Return the time at which the next sample of a worker is finished."""
        batch, taken = len(timeline.rows), timeline.rows[0][0] - timeline.step
        keys = (timeline.keys if self._padded else timeline.keys / batch) + timeline.step + (taken - 1) / 2
        seconds: float = taken * (self._base[batch] + self._slope[batch] * keys)
        return timeline.clock + seconds

    def drain(self, timeline: WorkerTimeline) -> None:
        """Decode the remaining samples once none waits for this worker."""
        if not timeline.rows:
            return
        samples = [sample for _, sample in timeline.rows]
        left = np.array([end for end, _ in timeline.rows]) - timeline.step
        keys = np.array([timeline.relative[sample] for sample in samples]) + timeline.step
        ends = drain(timeline.clock, left, keys, self.costs)
        for sample, moment in zip(samples, ends.finish.tolist(), strict=True):
            self.finish[sample] = moment
        timeline.times += ends.times.tolist()
        timeline.steps += (timeline.step + ends.steps).tolist()
        timeline.clock, timeline.rows = timeline.times[-1], []
