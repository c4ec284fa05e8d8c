"""When every sample is finished if nothing is moved: continuous batching on several workers, event by event.

Rule: time goes from one finished sample to the next; the steps between are summed by a formula. While samples wait, a
heap of workers is advanced; what a worker decodes when nothing waits any more is one sorted array. The coordinator's
dispatch is followed: least loaded first, each worker holds PREFETCH_SHARE more than it decodes. Every sample takes as
many decode steps as it has tokens; a prefill stalls its worker.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import Floats, StageCosts
from rlhf_planner.inter_stage.layout import PREFETCH_SHARE, Layout
from rlhf_planner.inter_stage.lengths import Ints


class Drained(NamedTuple):
    """A fixed set of rows decoded to their ends: `finish[i]` of row i; rows end at `times`, `steps` after the start."""

    finish: Floats
    times: Floats
    steps: Floats


def drain(start: float, steps: Ints, context: Floats, costs: StageCosts) -> Drained:
    """Decodes k rows that take `steps` more each and have `context` keys now; k at most max_batch_size."""
    base, slope = costs.step_tables
    order = np.argsort(steps, kind="stable")
    ends = steps[order].astype(np.float64)
    rows = np.arange(len(ends), 0, -1)
    taken = np.diff(ends, prepend=0.0)
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
    """What one worker decodes. `times` and `steps`: it had made so many decode steps at that time; linear between."""

    clock: float = 0.0
    step: int = 0
    waiting: deque[int] = field(default_factory=deque)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (step at which it ends, sample)."""
    keys: float = 0.0
    """Sum over rows, as if all had begun at step 0: the keys of a row are this share plus the step."""
    times: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stalled: float = 0.0
    """Seconds of prefill."""

    def steps_at(self, moment: float) -> float:
        """Decode steps made by then."""
        return float(np.interp(moment, self.times, self.steps)) if self.times else 0.0

    def boundary(self, moment: float) -> tuple[float, int]:
        """(time, steps) of the first step boundary at or after `moment`; of its end, when it is idle by then."""
        if not self.times or moment >= self.times[-1]:
            return moment, int(self.steps[-1]) if self.steps else 0
        step = int(np.ceil(self.steps_at(moment) - 1e-9))
        return max(moment, float(np.interp(step, self.steps, self.times))), step

    @property
    def busy(self) -> float:
        """Seconds of decoding and prefilling."""
        return self.times[-1] if self.times else 0.0


@dataclass
class Generation:
    """An iteration's generation without any move."""

    lengths: Ints
    prompts: Floats
    worker: Ints
    """[n] worker of each sample."""
    begun: Ints
    """[n] decode step of its worker at which a sample began."""
    finish: Floats
    """[n] seconds."""
    queue_empty: float
    """When the last sample was handed out to a worker."""
    timelines: list[WorkerTimeline]

    @property
    def end(self) -> float:
        """When the last sample is finished."""
        return float(self.finish.max())

    def threshold_time(self, threshold: int) -> float:
        """When at most `threshold` samples are unfinished and none is queued."""
        size = len(self.finish)
        if threshold >= size:
            return self.queue_empty
        when = np.partition(self.finish, size - threshold - 1)[size - threshold - 1]
        return max(self.queue_empty, float(when))


def generate(lengths: Ints, layout: Layout, costs: StageCosts) -> Generation:
    """All of it, without fusion. lengths: [batch] tokens of each response, >= 1."""
    size, workers = layout.batch, layout.generation_workers
    run = _Run(lengths, np.asarray(layout.prompts, dtype=np.float64), costs, workers)
    capacity = costs.max_batch_size + max(1, costs.max_batch_size // PREFETCH_SHARE)
    handed = min(size, workers * capacity)
    for index, timeline in enumerate(run.timelines):
        timeline.waiting.extend(range(index, handed, workers))
        run.worker[index:handed:workers] = index
        run.admit(timeline)
    run.refill(handed)
    for timeline in run.timelines:
        run.drain(timeline)
    return Generation(lengths, run.prompts, run.worker, run.begun, run.finish, run.queue_empty, run.timelines)


class _Run:
    """The state while `generate` runs."""

    def __init__(self, lengths: Ints, prompts: Floats, costs: StageCosts, workers: int) -> None:
        self.lengths, self.prompts, self.costs = lengths, prompts, costs
        self.worker = np.zeros(len(lengths), dtype=np.int64)
        self.begun = np.zeros(len(lengths), dtype=np.int64)
        self.finish = np.zeros(len(lengths))
        self.queue_empty = 0.0
        self.timelines = [WorkerTimeline() for _ in range(workers)]
        self._length, self._prompt = lengths.tolist(), self.prompts.tolist()
        self._base, self._slope = (table.tolist() for table in costs.step_tables)

    def admit(self, timeline: WorkerTimeline) -> None:
        """Fills free rows with what waits, after their prefill."""
        free = self.costs.max_batch_size - len(timeline.rows)
        new = [timeline.waiting.popleft() for _ in range(min(free, len(timeline.waiting)))]
        if not new:
            return
        tokens = sum(self._prompt[sample] for sample in new)
        stall = self.costs.prefill_seconds(len(new), tokens / len(new))
        timeline.times.append(timeline.clock)
        timeline.steps.append(timeline.step)
        timeline.clock += stall
        timeline.stalled += stall
        timeline.times.append(timeline.clock)
        timeline.steps.append(timeline.step)
        for sample in new:
            self.begun[sample] = timeline.step
            heapq.heappush(timeline.rows, (timeline.step + self._length[sample], sample))
        self._count_keys(timeline)

    def _count_keys(self, timeline: WorkerTimeline) -> None:
        relative = [self._prompt[sample] - self.begun[sample] for _, sample in timeline.rows]
        if relative:
            timeline.keys = float(max(relative) if self.costs.padded else sum(relative) / len(relative))

    def refill(self, handed: int) -> None:
        """Runs the workers, in the order of time, for as long as anything waits."""
        heap = [(self._next(timeline), index) for index, timeline in enumerate(self.timelines) if timeline.waiting]
        heapq.heapify(heap)
        while heap:
            moment, index = heapq.heappop(heap)
            timeline = self.timelines[index]
            timeline.step, timeline.clock = timeline.rows[0][0], moment
            while timeline.rows and timeline.rows[0][0] == timeline.step:
                _, sample = heapq.heappop(timeline.rows)
                self.finish[sample] = moment
                if handed < len(self._length):
                    timeline.waiting.append(handed)
                    self.worker[handed] = index
                    self.queue_empty = moment
                    handed += 1
            self.admit(timeline)
            if timeline.waiting:
                heapq.heappush(heap, (self._next(timeline), index))

    def _next(self, timeline: WorkerTimeline) -> float:
        """When the next sample of a worker is finished."""
        batch, taken = len(timeline.rows), timeline.rows[0][0] - timeline.step
        keys = timeline.keys + timeline.step + (taken - 1) / 2
        seconds: float = taken * (self._base[batch] + self._slope[batch] * keys)
        return timeline.clock + seconds

    def drain(self, timeline: WorkerTimeline) -> None:
        """The rest, when nothing waits for this worker any more."""
        if not timeline.rows:
            return
        samples = np.array([sample for _, sample in timeline.rows], dtype=np.int64)
        done = timeline.step - self.begun[samples]
        ends = drain(timeline.clock, self.lengths[samples] - done, self.prompts[samples] + done, self.costs)
        self.finish[samples] = ends.finish
        timeline.times.extend(ends.times.tolist())
        timeline.steps.extend((timeline.step + ends.steps).tolist())
        timeline.clock, timeline.rows = timeline.times[-1], []
