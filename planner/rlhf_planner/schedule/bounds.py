"""Lower bounds on the makespan: what no schedule of an instance can beat.

Pure arithmetic on a layout. With a split layout a weight-gradient step may come last on a device, so only the tails of
stages without one count. Sources: RLHFuse (arXiv 2409.13221) for the published terms; the one-machine preemptive
relaxation is Jackson's rule (Carlier and Pinson 1989).
"""

from __future__ import annotations

import heapq

import numpy as np

from rlhf_planner.schedule.simulate import BACKWARD, FORWARD, KINDS, WEIGHT, Floats, InstanceArrays


def heads(lay: InstanceArrays) -> Floats:
    """Earliest start of the first forward step of every stage, [stages]."""
    result = np.zeros(lay.stages)
    for k in range(lay.stages):  # stages of a pipeline are numbered in order, so `before` is always done
        if lay.before[k] >= 0:
            result[k] = result[k - 1] + lay.duration[KINDS * (k - 1)] + lay.lag_before[k]
    return result


def backward_tails(lay: InstanceArrays) -> Floats:
    """Least time from the end of a backward (input-gradient) step of every stage to the end of its micro-batch,
    [stages].
    """
    result = np.zeros(lay.stages)
    for k in range(lay.stages):
        own = lay.duration[KINDS * k + WEIGHT]
        if lay.before[k] >= 0:
            upstream = lay.lag_before[k] + lay.duration[KINDS * (k - 1) + BACKWARD] + result[k - 1]
            result[k] = max(own, upstream)
        else:
            result[k] = own
    return result


def published_bound(lay: InstanceArrays) -> float:
    """The published lower bound of the unsplit backward; for a split layout max over devices of first + work + tail.

    Terms: the critical path of a pipeline through its slowest stage, and per device the least time before it can be
    busy, its work, and the least time after it, which is zero where a weight-gradient step can come last.
    """
    first, tail = heads(lay), backward_tails(lay)
    work = (np.diff(lay.base) * lay.duration).reshape(-1, KINDS).sum(axis=1)
    through = first + lay.microbatches * (lay.duration[FORWARD::KINDS] + lay.duration[BACKWARD::KINDS]) + tail
    last = np.where(lay.weight, 0.0, tail)
    bound = float(through.max())
    for device in range(lay.instance.devices):
        on = lay.device == device
        if on.any():
            bound = max(bound, float(first[on].min() + work[on].sum() + last[on].min()))
    return bound


def makespan_bound(lay: InstanceArrays) -> float:
    """The published bound, raised by the preemptive one-machine relaxation of every device."""
    head, tail = step_windows(lay)
    machines = (_preemptive(lay, device, head, tail) for device in range(lay.instance.devices))
    return max(published_bound(lay), max(machines))


def peak_bound(lay: InstanceArrays, makespan: float) -> float:
    """A lower bound on the peak activation of any schedule of the given makespan, from windows and from averages.

    Windows: at any moment a device holds at least the micro-batches whose forward step must have started and whose
    backward step cannot have ended. Averages: every micro-batch holds its activation for at least its way through the
    later stages and back, so the device's mean over the makespan is at least the sum of those.
    """
    head, tail = step_windows(lay)
    hair = 1e-9 * max(1.0, makespan)  # a step may start the moment another ends, whatever sums of floats say
    windows, energy = np.zeros(lay.instance.devices), np.zeros(lay.instance.devices)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(lay.instance.devices)]
    for k in range(lay.stages):
        last = lay.operations(k)[-1]
        forward, freed = _steps(lay, KINDS * k), _steps(lay, last)
        ends = head[freed] + lay.duration[last]
        held = float(lay.activation[k])
        energy[lay.device[k]] += held * float((ends - head[forward]).min()) * int(lay.microbatches[k])
        windows[lay.device[k]] = max(windows[lay.device[k]], held)
        row = changes[int(lay.device[k])]
        for must, may in zip(makespan - tail[forward], ends, strict=True):
            if must < may - 2 * hair:
                row += [(float(must) + hair, held), (float(may) - hair, -held)]
    for device, row in enumerate(changes):
        holds = 0.0
        for _, change in sorted(row):
            holds += change
            windows[device] = max(windows[device], holds)
    return float(max(windows.max(), (energy / makespan).max()))


def step_windows(lay: InstanceArrays) -> tuple[Floats, Floats]:
    """(earliest start, least time from start to the end of the schedule) of every step, each [steps].

    Along a stage steps of one operation are first in, first out, so micro-batch m also waits for m steps before it.
    """
    head, tail = np.zeros(lay.steps), np.zeros(lay.steps)
    last_tail = backward_tails(lay)
    for _, stages in _by_pipeline(lay):
        count = int(lay.microbatches[stages[0]])
        ready = np.zeros(count)
        for k in stages:
            ready = _fifo(ready + lay.lag_before[k], float(lay.duration[KINDS * k]))
            head[_steps(lay, KINDS * k)] = ready
            ready = ready + lay.duration[KINDS * k]
        for k in reversed(stages):
            ready = _fifo(ready + lay.lag_after[k], float(lay.duration[KINDS * k + BACKWARD]))
            head[_steps(lay, KINDS * k + BACKWARD)] = ready
            ready = ready + lay.duration[KINDS * k + BACKWARD]
            if lay.weight[k]:
                head[_steps(lay, KINDS * k + WEIGHT)] = _fifo(ready, float(lay.duration[KINDS * k + WEIGHT]))
        _tails(lay, stages, last_tail, tail)
    return head, tail


def _tails(lay: InstanceArrays, stages: list[int], last_tail: Floats, tail: Floats) -> None:
    count = int(lay.microbatches[stages[0]])
    rest = np.zeros(count)
    for k in stages:
        own = float(lay.duration[KINDS * k + WEIGHT])
        if lay.weight[k]:
            weight_tail = own * np.arange(count, 0, -1)
            tail[_steps(lay, KINDS * k + WEIGHT)] = weight_tail
            rest = np.maximum(rest, weight_tail)
        rest = _fifo_back(rest + float(lay.duration[KINDS * k + BACKWARD]), float(lay.duration[KINDS * k + BACKWARD]))
        tail[_steps(lay, KINDS * k + BACKWARD)] = rest
        rest = rest + (lay.lag_after[k] if lay.after[k] >= 0 else 0.0)
    for k in reversed(stages):
        rest = rest if lay.after[k] < 0 else rest + lay.lag_after[k]
        rest = _fifo_back(rest + float(lay.duration[KINDS * k]), float(lay.duration[KINDS * k]))
        tail[_steps(lay, KINDS * k)] = rest


def _steps(lay: InstanceArrays, operation: int) -> slice:
    return slice(int(lay.base[operation]), int(lay.base[operation + 1]))


def _by_pipeline(lay: InstanceArrays) -> list[tuple[int, list[int]]]:
    return [(p, np.flatnonzero(lay.pipeline == p).tolist()) for p in range(len(lay.instance.pipelines))]


def _fifo(ready: Floats, duration: float) -> Floats:
    """Earliest starts of steps released at `ready` that run one after another."""
    offset = duration * np.arange(len(ready))
    return np.asarray(np.maximum.accumulate(ready - offset) + offset)


def _fifo_back(tail: Floats, duration: float) -> Floats:
    """The same from the end: least time from each step's start to the end."""
    offset = duration * np.arange(len(tail))[::-1]
    return np.asarray(np.maximum.accumulate((tail - offset)[::-1])[::-1] + offset)


def _preemptive(lay: InstanceArrays, device: int, head: Floats, tail: Floats) -> float:
    """Least makespan of one device whose steps may be interrupted, given heads and tails; 0 for an idle device."""
    on = np.flatnonzero(lay.device == device)
    if not len(on):
        return 0.0
    steps, lengths = [], []
    for k in on:
        for op in lay.operations(int(k)):
            block = np.arange(lay.base[op], lay.base[op + 1])
            steps.append(block)
            lengths.append(np.full(len(block), lay.duration[op]))
    step, length = np.concatenate(steps), np.concatenate(lengths)
    after = tail[step] - length
    order = np.argsort(head[step], kind="stable")
    released, left = head[step][order].tolist(), length[order].tolist()
    waiting: list[tuple[float, int]] = []
    now, best, at, tails = 0.0, 0.0, 0, after[order].tolist()
    while at < len(released) or waiting:
        if not waiting:
            now = max(now, released[at])
        while at < len(released) and released[at] <= now:
            heapq.heappush(waiting, (-tails[at], at))
            at += 1
        _, chosen = waiting[0]
        until = released[at] if at < len(released) else float("inf")
        if now + left[chosen] <= until:
            heapq.heappop(waiting)
            now += left[chosen]
            best = max(best, now + tails[chosen])
        else:
            left[chosen] -= until - now
            now = until
    return best
