"""Lower bounds on the makespan and the peak of any schedule of an instance. Rule: pure.

Sources: RLHFuse (arXiv 2409.13221) for the published terms; the one-machine preemptive relaxation is Jackson's rule
(Carlier and Pinson 1989).
"""

from __future__ import annotations

import heapq

import numpy as np

from rlhf_planner.schedule.simulate import BACKWARD, FORWARD, KINDS, WEIGHT, Floats, InstanceArrays


def heads(arrays: InstanceArrays) -> Floats:
    """Return the earliest start of the first forward step of every stage, float64 [stages]."""
    result = np.zeros(arrays.stages)
    for k in range(arrays.stages):  # stages of a pipeline are numbered in order, so `before` is already done
        if arrays.before[k] >= 0:
            result[k] = result[k - 1] + arrays.duration[KINDS * (k - 1)] + arrays.lag_before[k]
    return result


def backward_tails(arrays: InstanceArrays) -> Floats:
    """Return the least time from the end of a backward (input-gradient) step to the end of its micro-batch.

    The result is float64 [stages].
    """
    result = np.zeros(arrays.stages)
    for k in range(arrays.stages):
        own = arrays.duration[KINDS * k + WEIGHT]
        if arrays.before[k] >= 0:
            upstream = arrays.lag_before[k] + arrays.duration[KINDS * (k - 1) + BACKWARD] + result[k - 1]
            result[k] = max(own, upstream)
        else:
            result[k] = own
    return result


def published_bound(arrays: InstanceArrays) -> float:
    """Return the published lower bound on the makespan, also for a split backward.

    Terms: the critical path of a pipeline through its slowest stage; and per device the least time before its first
    step, its work, and the least time after it.
    """
    first, tail = heads(arrays), backward_tails(arrays)
    work = (np.diff(arrays.base) * arrays.duration).reshape(-1, KINDS).sum(axis=1)
    through = first + arrays.microbatches * (arrays.duration[FORWARD::KINDS] + arrays.duration[BACKWARD::KINDS]) + tail
    last = np.where(arrays.weight, 0.0, tail)
    bound = float(through.max())
    for device in range(arrays.instance.devices):
        on = arrays.device == device
        if on.any():
            bound = max(bound, float(first[on].min() + work[on].sum() + last[on].min()))
    return bound


def makespan_bound(arrays: InstanceArrays) -> float:
    """Return the published bound, raised to the preemptive one-machine relaxation of every device."""
    head, tail = step_windows(arrays)
    machines = (_preemptive(arrays, device, head, tail) for device in range(arrays.instance.devices))
    return max(published_bound(arrays), max(machines))


def peak_bound(arrays: InstanceArrays, makespan: float) -> float:
    """Return a lower bound on the peak activation of any schedule with this makespan.

    Windows: at any moment a device needs memory for the micro-batches that must have begun and cannot have ended there.
    Averages: the mean over the makespan is at least the sum of the least residence times.
    """
    head, tail = step_windows(arrays)
    hair = 1e-9 * max(1.0, makespan)  # a step may start the moment another ends, despite rounding of floats
    windows, energy = np.zeros(arrays.instance.devices), np.zeros(arrays.instance.devices)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(arrays.instance.devices)]
    for k in range(arrays.stages):
        last = arrays.operations(k)[-1]
        forward, freed = _steps(arrays, KINDS * k), _steps(arrays, last)
        ends = head[freed] + arrays.duration[last]
        amount = float(arrays.activation[k])
        energy[arrays.device[k]] += amount * float((ends - head[forward]).min()) * int(arrays.microbatches[k])
        windows[arrays.device[k]] = max(windows[arrays.device[k]], amount)
        row = changes[int(arrays.device[k])]
        for must, may in zip(makespan - tail[forward], ends, strict=True):
            if must < may - 2 * hair:
                row += [(float(must) + hair, amount), (float(may) - hair, -amount)]
    for device, row in enumerate(changes):
        holds = 0.0
        for _, change in sorted(row):
            holds += change
            windows[device] = max(windows[device], holds)
    return float(max(windows.max(), (energy / makespan).max()))


def step_windows(arrays: InstanceArrays) -> tuple[Floats, Floats]:
    """Return (earliest start, least time from the start to the end of the schedule) of every step, each float64
    [steps].

    Steps of one operation on a stage are first in, first out.
    """
    head, tail = np.zeros(arrays.steps), np.zeros(arrays.steps)
    last_tail = backward_tails(arrays)
    for _, stages in _by_pipeline(arrays):
        count = int(arrays.microbatches[stages[0]])
        ready = np.zeros(count)
        for k in stages:
            ready = _fifo(ready + arrays.lag_before[k], float(arrays.duration[KINDS * k]))
            head[_steps(arrays, KINDS * k)] = ready
            ready = ready + arrays.duration[KINDS * k]
        for k in reversed(stages):
            ready = _fifo(ready + arrays.lag_after[k], float(arrays.duration[KINDS * k + BACKWARD]))
            head[_steps(arrays, KINDS * k + BACKWARD)] = ready
            ready = ready + arrays.duration[KINDS * k + BACKWARD]
            if arrays.weight[k]:
                head[_steps(arrays, KINDS * k + WEIGHT)] = _fifo(ready, float(arrays.duration[KINDS * k + WEIGHT]))
        _tails(arrays, stages, last_tail, tail)
    return head, tail


def _tails(arrays: InstanceArrays, stages: list[int], last_tail: Floats, tail: Floats) -> None:
    count = int(arrays.microbatches[stages[0]])
    rest = np.zeros(count)
    for k in stages:
        own = float(arrays.duration[KINDS * k + WEIGHT])
        if arrays.weight[k]:
            weight_tail = own * np.arange(count, 0, -1)
            tail[_steps(arrays, KINDS * k + WEIGHT)] = weight_tail
            rest = np.maximum(rest, weight_tail)
        rest = _fifo_back(
            rest + float(arrays.duration[KINDS * k + BACKWARD]), float(arrays.duration[KINDS * k + BACKWARD])
        )
        tail[_steps(arrays, KINDS * k + BACKWARD)] = rest
        rest = rest + (arrays.lag_after[k] if arrays.after[k] >= 0 else 0.0)
    for k in reversed(stages):
        rest = rest if arrays.after[k] < 0 else rest + arrays.lag_after[k]
        rest = _fifo_back(rest + float(arrays.duration[KINDS * k]), float(arrays.duration[KINDS * k]))
        tail[_steps(arrays, KINDS * k)] = rest


def _steps(arrays: InstanceArrays, operation: int) -> slice:
    return slice(int(arrays.base[operation]), int(arrays.base[operation + 1]))


def _by_pipeline(arrays: InstanceArrays) -> list[tuple[int, list[int]]]:
    return [(p, np.flatnonzero(arrays.pipeline == p).tolist()) for p in range(len(arrays.instance.pipelines))]


def _fifo(ready: Floats, duration: float) -> Floats:
    """Return the earliest starts of steps released at `ready` that run one after another."""
    offset = duration * np.arange(len(ready))
    return np.asarray(np.maximum.accumulate(ready - offset) + offset)


def _fifo_back(tail: Floats, duration: float) -> Floats:
    """Return the least time from each step's start to the end, for steps that run one after another."""
    offset = duration * np.arange(len(tail))[::-1]
    return np.asarray(np.maximum.accumulate((tail - offset)[::-1])[::-1] + offset)


def _preemptive(arrays: InstanceArrays, device: int, head: Floats, tail: Floats) -> float:
    """Return the least makespan of one device with interruptible steps, given heads and tails; 0 for an idle device."""
    on = np.flatnonzero(arrays.device == device)
    if not len(on):
        return 0.0
    steps, lengths = [], []
    for k in on:
        for op in arrays.operations(int(k)):
            block = np.arange(arrays.base[op], arrays.base[op + 1])
            steps.append(block)
            lengths.append(np.full(len(block), arrays.duration[op]))
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
