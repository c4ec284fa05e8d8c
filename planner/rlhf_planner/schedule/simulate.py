"""Exact event simulation of a schedule: start times, deadlock, activation peaks.

A schedule is an ordered list of operations per device. Operation 3 * k + kind belongs to stage k over all pipelines;
kind is FORWARD, BACKWARD (the input-gradient step if split) or WEIGHT. Micro-batches of one operation run first in,
first out.

Rules, extended from RLHFuse (arXiv 2409.13221): start = max(end of the same micro-batch's previous step + transfer of
that edge, time the device is idle); activation is allocated at the start of a forward step and freed at the end of the
backward (weight-gradient if split) step.

Must never share code with the checker, `schedule_check`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlhf_planner.schedule.compiled import compiled, inlined
from rlhf_planner.schedule.instance import Instance

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
KINDS = 3


class DeadlockError(ValueError):
    """Orders that do not run all steps: a step waits for one that never runs, or steps are missing."""


@dataclass(frozen=True)
class InstanceArrays:
    """Arrays of an instance over its stages (index k) and operations (index 3k + kind), for compiled loops."""

    instance: Instance
    split: bool
    device: Ints  # [stages] device of stage k
    pipeline: Ints  # [stages]
    stage: Ints  # [stages] number within its pipeline
    microbatches: Ints  # [stages]
    before: Ints  # [stages] stage feeding the forward step, -1 at the first
    after: Ints  # [stages] stage feeding the backward step, -1 at the last
    lag_before: Floats  # [stages] transfer time from `before`
    lag_after: Floats  # [stages] transfer time from `after`
    activation: Floats  # [stages]
    duration: Floats  # [operations]; a stage without a weight-gradient step has 0 there
    weight: Bools  # [stages] whether the stage has a separate weight-gradient step
    base: Ints  # [operations + 1] first step number of an operation: step = base[operation] + micro-batch

    @property
    def stages(self) -> int:
        """Number of stages of all pipelines."""
        return len(self.device)

    @property
    def steps(self) -> int:
        """Number of steps of all operations."""
        return int(self.base[-1])

    @cached_property
    def device_lengths(self) -> Ints:
        """Number of steps of each device, int64 [devices]."""
        per_stage = self.microbatches * np.where(self.weight, 3, 2)
        return np.bincount(self.device, weights=per_stage, minlength=self.instance.devices).astype(np.int64)

    def operations(self, k: int) -> tuple[int, ...]:
        """Return the operations of stage `k` in the order in which a micro-batch visits them."""
        first = KINDS * k
        return (first, first + 1, first + 2) if self.weight[k] else (first, first + 1)


def instance_arrays(instance: Instance, split: bool = False) -> InstanceArrays:
    """Return the arrays of an instance; `split` gives stages with a weight-gradient time a separate weight-gradient
    step."""
    rows = [(p, s) for p, pipeline in enumerate(instance.pipelines) for s in range(pipeline.stages)]
    count = len(rows)
    before, after = np.full(count, -1), np.full(count, -1)
    lag_before, lag_after = np.zeros(count), np.zeros(count)
    duration, weight = np.zeros(KINDS * count), np.zeros(count, dtype=np.bool_)
    base = np.zeros(KINDS * count + 1, dtype=np.int64)
    for k, (p, s) in enumerate(rows):
        pipe = instance.pipelines[p]
        if s > 0:
            before[k], lag_before[k] = k - 1, pipe.lag(s - 1)
        if s + 1 < pipe.stages:
            after[k], lag_after[k] = k + 1, pipe.lag(s)
        weight[k] = split and pipe.weight_gradient[s] > 0
        own = pipe.weight_gradient[s] if weight[k] else 0.0
        duration[KINDS * k : KINDS * k + KINDS] = pipe.forward[s], pipe.backward[s] - own, own
        counts = (pipe.microbatches, pipe.microbatches, pipe.microbatches if weight[k] else 0)
        base[KINDS * k + 1 : KINDS * k + 4] = base[KINDS * k] + np.cumsum(counts)
    pipes = instance.pipelines
    return InstanceArrays(
        instance=instance,
        split=split,
        device=np.array([pipes[p].stage_devices[s] for p, s in rows], dtype=np.int64),
        pipeline=np.array([p for p, _ in rows], dtype=np.int64),
        stage=np.array([s for _, s in rows], dtype=np.int64),
        microbatches=np.array([pipes[p].microbatches for p, _ in rows], dtype=np.int64),
        before=before.astype(np.int64),
        after=after.astype(np.int64),
        lag_before=lag_before,
        lag_after=lag_after,
        activation=np.array([pipes[p].activation[s] for p, s in rows], dtype=np.float64),
        duration=duration,
        weight=weight,
        base=base,
    )


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule.

    `orders` int64 [devices, longest] are operations, -1 after the last; `start` is float64 [steps].
    """

    arrays: InstanceArrays
    orders: Ints
    start: Floats
    makespan: float
    peaks: Floats  # [devices] peak activation

    @property
    def peak(self) -> float:
        """Highest peak activation of a device."""
        return float(self.peaks.max())

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, lower is better: makespan, peak activation, sum of peaks over devices."""
        return (self.makespan, round(self.peak, 9), round(float(self.peaks.sum()), 9))

    @property
    def bubble(self) -> float:
        """Share of device time, up to the makespan, in which devices that have work are idle."""
        arrays = self.arrays
        work = float((np.diff(arrays.base) * arrays.duration).sum())
        return 1.0 - work / (self.makespan * int((arrays.device_lengths > 0).sum()))


def simulate(arrays: InstanceArrays, orders: Ints) -> Timeline:
    """Return the simulated schedule of `orders`.

    Raises DeadlockError if devices wait for one another or steps are missing, and ValueError for an operation that
    occurs too often or on another device.
    """
    start = np.zeros(arrays.steps)
    makespan, done = run_orders(orders, *kernel_arguments(arrays), start)
    if done < 0:
        raise ValueError(f"device {-done - 1} is given an operation more often than it has micro-batches")
    if done != arrays.steps:
        raise DeadlockError(
            f"only {done} of {arrays.steps} steps can run: devices wait for one another, or steps are missing"
        )
    peaks = activation_peaks(orders, arrays.activation, arrays.weight)
    return Timeline(arrays, orders, start, float(makespan), peaks)


def pad_orders(arrays: InstanceArrays, lists: list[list[int]]) -> Ints:
    """Return lists of operations, one per device, as the int64 [devices, longest] array, -1 after the last."""
    orders = np.full((arrays.instance.devices, max(len(row) for row in lists)), -1, dtype=np.int64)
    for device, row in enumerate(lists):
        orders[device, : len(row)] = row
    return orders


def orders_by_start(arrays: InstanceArrays, start: Floats) -> Ints:
    """Return the orders that start times (float64 [steps]) imply.

    Equal starts are in the order of operations, then of micro-batches.
    """
    operation = np.repeat(np.arange(KINDS * arrays.stages), np.diff(arrays.base))
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    for step in np.lexsort((operation, start)):
        lists[int(arrays.device[operation[step] // KINDS])].append(int(operation[step]))
    return pad_orders(arrays, lists)


def kernel_arguments(arrays: InstanceArrays) -> tuple[Floats, Ints, Ints, Ints, Ints, Ints, Floats, Floats, Bools]:
    """Return the arrays of an instance that compiled loops take.

    The order is duration, device, microbatches, base, before, after, lag_before, lag_after, weight.
    """
    return (
        arrays.duration, arrays.device, arrays.microbatches, arrays.base, arrays.before, arrays.after,
        arrays.lag_before, arrays.lag_after, arrays.weight,
    )  # fmt: skip


@inlined
def feeder(op: int, before: int, after: int) -> int:
    """Return the neighbouring stage's operation that feeds operation `op`, whose stage has these neighbours; -1 if
    none.
    """
    if op % 3 == 0 and before >= 0:
        return op - 3
    return op + 3 if op % 3 == 1 and after >= 0 else -1


@compiled
def run_orders(
    orders: Ints,
    duration: Floats,
    device: Ints,
    microbatches: Ints,
    base: Ints,
    before: Ints,
    after: Ints,
    lag_before: Floats,
    lag_after: Floats,
    weight: Bools,
    start: Floats,
) -> tuple[float, int]:
    """Set `start` (float64 [steps]) and return (makespan, steps run).

    Steps run is -(device + 1) if a device has an operation too often, or one of another device.
    """
    devices, longest = orders.shape
    at = np.zeros(devices, np.int64)
    idle = np.zeros(devices)
    count = np.zeros(len(duration), np.int64)
    waiting = np.ones(devices, np.bool_)
    stack = np.empty(devices, np.int64)
    for d in range(devices):
        stack[d] = devices - 1 - d
    top, done, makespan = devices, 0, 0.0
    while top > 0:
        top -= 1
        d = int(stack[top])
        waiting[d] = False
        while at[d] < longest and orders[d, at[d]] >= 0:
            op = int(orders[d, at[d]])
            k, kind = op // 3, op % 3
            m = int(count[op])
            if m >= microbatches[k] or device[k] != d or (kind == 2 and not weight[k]):
                return makespan, -(d + 1)
            other = feeder(op, before[k], after[k])
            if (kind > 0 and count[op - 1] <= m) or (other >= 0 and count[other] <= m):
                break
            ready = 0.0
            if other >= 0:
                ready = start[base[other] + m] + duration[other] + (lag_before[k] if kind == 0 else lag_after[k])
            begin = max(ready, idle[d])
            start[base[op] + m] = begin
            idle[d] = begin + duration[op]
            makespan = max(makespan, idle[d])
            count[op] = m + 1
            at[d] += 1
            done += 1
            wake = after[k] if kind == 0 else before[k] if kind == 1 else -1
            if wake >= 0 and not waiting[device[wake]] and device[wake] != d:
                waiting[device[wake]] = True
                stack[top] = device[wake]
                top += 1
    return makespan, done


@compiled
def activation_peaks(orders: Ints, activation: Floats, weight: Bools) -> Floats:
    """Return the peak activation of every device, float64 [devices].

    `activation` is float64 [stages], `weight` bool [stages].
    """
    devices, longest = orders.shape
    peaks = np.zeros(devices)
    for d in range(devices):
        in_use = 0.0
        for i in range(longest):
            op = orders[d, i]
            if op < 0:
                break
            k, kind = op // 3, op % 3
            if kind == 0:
                in_use += activation[k]
                peaks[d] = max(peaks[d], in_use)
            elif kind == 2 or not weight[k]:
                in_use -= activation[k]
    return peaks
