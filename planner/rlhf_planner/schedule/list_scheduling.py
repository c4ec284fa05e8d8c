"""List scheduling under a memory cap: the fast constructive half of the search.

A forward step starts only if the cap leaves room for it *and* for one micro-batch of every other stage of the device
that has none. So no schedule deadlocks or exceeds the cap, given `fits_together`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlhf_planner.schedule.bounds import step_windows
from rlhf_planner.schedule.compiled import compiled
from rlhf_planner.schedule.simulate import (
    BACKWARD,
    KINDS,
    WEIGHT,
    Bools,
    Floats,
    InstanceArrays,
    Ints,
    Timeline,
    kernel_arguments,
    orders_by_start,
    simulate,
)

EVALUATION = 1.0e-6  # nominal seconds of one list schedule, per step


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """Priority of a step: `tail` times the least time from its start to the end, plus a bonus by kind.

    Bonuses are shares of the largest sum of a step's head and tail. `patience`, in units of the device's shortest
    forward step, is the wait for a step of higher priority. Stage s of S may have `slope` * (S - s) + `room` * S
    micro-batches in flight.
    """

    tail: float
    backward: float
    weight: float
    patience: float
    scale: tuple[float, ...] = ()
    bonus: tuple[float, ...] = ()
    slope: tuple[float, ...] = ()
    room: tuple[float, ...] = ()


def rules() -> Iterator[PriorityRule]:
    """Yield the rules to try."""
    for patience in (0.0, 1.0):
        for tail in (1.0, 0.0, -1.0):
            for backward in (-10.0, -0.2, -0.05, 0.0, 0.03, 0.1, 0.3, 10.0):
                yield PriorityRule(tail, backward, -20.0, patience)
    for backward in (-0.05, 0.0, 0.03, 0.3):
        yield PriorityRule(1.0, backward, 0.0, 0.0)


def fits_together(arrays: InstanceArrays, cap: float | None) -> bool:
    """Return whether one micro-batch of all stages of every device fits under the cap."""
    per_device = np.bincount(arrays.device, weights=arrays.activation)
    return cap is None or float(per_device.max()) <= cap + 1e-9


def list_schedule(
    arrays: InstanceArrays, rule: PriorityRule, cap: float | None, windows: tuple[Floats, Floats]
) -> Timeline:
    """Return the schedule of one rule. `windows` is `step_windows(arrays)`."""
    head, tail = windows
    span = float((head + tail).max())
    counts = np.diff(arrays.base)
    kind = np.repeat(np.arange(KINDS * arrays.stages) % KINDS, counts)
    priority = rule.tail * tail + span * (rule.backward * (kind == BACKWARD) + rule.weight * (kind == WEIGHT))
    limits = arrays.microbatches
    if rule.scale:
        pipeline = np.repeat(np.repeat(arrays.pipeline, KINDS), counts)
        priority += rule.tail * tail * (np.array(rule.scale)[pipeline] - 1) + span * np.array(rule.bonus)[pipeline]
        total = np.array([pipe.stages for pipe in arrays.instance.pipelines])[arrays.pipeline]
        flight = (
            np.array(rule.slope)[arrays.pipeline] * (total - arrays.stage)
            + np.array(rule.room)[arrays.pipeline] * total
        )
        limits = np.maximum(1, np.ceil(flight)).astype(np.int64)
    patience = np.zeros(arrays.instance.devices)
    for device in range(arrays.instance.devices):
        on = np.flatnonzero(arrays.device == device)
        if len(on):
            patience[device] = rule.patience * arrays.duration[KINDS * on].min()
    limit = np.inf if cap is None else cap + 1e-9
    start = fill(
        *kernel_arguments(arrays), arrays.activation, priority, patience, limits, limit, operations_by_device(arrays)
    )
    return simulate(arrays, orders_by_start(arrays, start))


def listed(arrays: InstanceArrays, cap: float | None) -> list[Timeline]:
    """Return the schedules of all rules, best first; none if the cap is too tight for list scheduling."""
    if not fits_together(arrays, cap):
        return []
    windows = step_windows(arrays)
    return sorted((list_schedule(arrays, rule, cap, windows) for rule in rules()), key=lambda found: found.rank)


def tuned(
    arrays: InstanceArrays, cap: float, enough: float, evaluations: int, seed: int
) -> tuple[Timeline | None, int]:
    """Return the best list schedule under the cap over random rules, and the number of schedules made.

    The search stops at a makespan of `enough`. The schedule is None if the cap is too small.
    """
    if not fits_together(arrays, cap):
        return None, 0
    random, windows = np.random.default_rng(seed), step_windows(arrays)
    pipelines = len(arrays.instance.pipelines)
    width = np.concatenate([[0.005], np.repeat([0.05, 0.02, 0.1, 0.05], pipelines)])
    best: Timeline | None = None
    at = np.zeros(len(width))
    for evaluation in range(evaluations):
        if best is None or random.random() < 0.3:
            draw = random.normal(0.0, 1.0, len(width)) * np.concatenate(
                [[0.02], np.repeat([0.2, 0.05], pipelines), np.zeros(2 * pipelines)]
            )
            draw[1 : 1 + pipelines] += 1.0
            draw[1 + 2 * pipelines : 1 + 3 * pipelines] = random.uniform(0.3, 2.0, pipelines)
            draw[1 + 3 * pipelines :] = random.uniform(0.0, 0.8, pipelines)
        else:
            draw = at + random.normal(0.0, 1.0, len(width)) * width * random.integers(0, 2, len(width))
        parts = [tuple(float(x) for x in part) for part in np.split(draw[1:], 4)]
        schedule = list_schedule(arrays, PriorityRule(1.0, float(draw[0]), -20.0, 0.0, *parts), cap, windows)
        if best is None or schedule.rank <= best.rank:
            best, at = schedule, draw
        if best.makespan <= enough * (1 + 1e-9):
            return best, evaluation + 1
    return best, evaluations


def operations_by_device(arrays: InstanceArrays) -> Ints:
    """Return the operations of every device, int64 [devices, most operations of a device], -1 after the last."""
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    for k in range(arrays.stages):
        lists[int(arrays.device[k])] += arrays.operations(k)
    table = np.full((len(lists), max(len(row) for row in lists)), -1, dtype=np.int64)
    for device, row in enumerate(lists):
        table[device, : len(row)] = row
    return table


@compiled
def fill(
    duration: Floats,
    device: Ints,
    microbatches: Ints,
    base: Ints,
    before: Ints,
    after: Ints,
    lag_before: Floats,
    lag_after: Floats,
    weight: Bools,
    activation: Floats,
    priority: Floats,
    patience: Floats,
    limits: Ints,
    cap: float,
    table: Ints,
) -> Floats:
    """Return the start times of all steps, float64 [steps].

    Arrays are those of `kernel_arguments`, and `activation` float64 [stages], `priority` float64 [steps], `patience`
    float64 [devices] in time units, `limits` int64 [stages] of micro-batches in flight.
    """
    devices = table.shape[0]
    idle, in_use = np.zeros(devices), np.zeros(devices)
    count = np.zeros(len(duration), np.int64)
    start = np.zeros(base[-1])
    ready = np.full(len(duration), np.inf)
    pick, when = np.full(devices, -1), np.full(devices, np.inf)
    stale = np.ones(devices, np.bool_)
    for _ in range(base[-1]):
        for d in range(devices):
            if stale[d]:
                _ready_times(
                    table[d], duration, microbatches, base, before, after, lag_before, lag_after, weight, activation,
                    limits, cap - in_use[d], count, start, ready,
                )  # fmt: skip
                pick[d], when[d] = _choose(table[d], base, count, ready, priority, idle[d], patience[d])
                stale[d] = False
        d = int(np.argmin(when))
        op = int(pick[d])
        k, kind = op // 3, op % 3
        start[base[op] + count[op]] = when[d]
        idle[d] = when[d] + duration[op]
        count[op] += 1
        if kind == 0:
            in_use[d] += activation[k]
        elif kind == 2 or not weight[k]:
            in_use[d] -= activation[k]
        stale[d] = True
        if kind == 0 and after[k] >= 0:
            stale[device[after[k]]] = True
        if kind == 1 and before[k] >= 0:
            stale[device[before[k]]] = True
    return start


@compiled
def _ready_times(  # noqa: C901  one flat loop, compiled
    row: Ints,
    duration: Floats,
    microbatches: Ints,
    base: Ints,
    before: Ints,
    after: Ints,
    lag_before: Floats,
    lag_after: Floats,
    weight: Bools,
    activation: Floats,
    limits: Ints,
    room: float,
    count: Ints,
    start: Floats,
    ready: Floats,
) -> None:
    """Set `ready` for the operations of one device; infinity if the next step cannot run yet."""
    reserve = 0.0
    for op in row:
        if op >= 0 and op % 3 == 0:
            freed = count[op + 2] if weight[op // 3] else count[op + 1]
            if count[op] == freed and count[op] < microbatches[op // 3]:
                reserve += activation[op // 3]
    for op in row:
        if op < 0:
            break
        k, kind, m = op // 3, op % 3, count[op]
        ready[op] = np.inf
        if m >= microbatches[k] or (kind > 0 and count[op - 1] <= m):
            continue
        if kind == 2:
            ready[op] = 0.0
        elif kind == 1 and after[k] < 0:
            ready[op] = start[base[op - 1] + m] + duration[op - 1]
        elif kind == 1:
            if count[op + 3] > m:
                ready[op] = start[base[op + 3] + m] + duration[op + 3] + lag_after[k]
        else:
            freed = count[op + 2] if weight[k] else count[op + 1]
            others = reserve - activation[k] if m == freed else reserve
            if activation[k] + others > room or m - freed >= limits[k]:
                continue
            if before[k] < 0:
                ready[op] = 0.0
            elif count[op - 3] > m:
                ready[op] = start[base[op - 3] + m] + duration[op - 3] + lag_before[k]


@compiled
def _choose(
    row: Ints, base: Ints, count: Ints, ready: Floats, priority: Floats, idle: float, patience: float
) -> tuple[int, float]:
    """Return (operation, start) of highest priority among those that can start within `patience` of the first; (-1,
    infinity) if none can start."""
    first = np.inf
    for op in row:
        if op >= 0:
            first = min(first, max(ready[op], idle))
    best, best_priority, best_start = -1, -np.inf, np.inf
    if first == np.inf:
        return best, best_start
    for op in row:
        if op < 0 or ready[op] == np.inf:
            continue
        begin = max(ready[op], idle)
        if begin > first + patience:
            continue
        value = priority[base[op] + count[op]]
        if value > best_priority or (value == best_priority and begin < best_start):
            best, best_priority, best_start = int(op), value, begin
    return best, best_start
