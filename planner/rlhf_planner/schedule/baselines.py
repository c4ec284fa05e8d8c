"""Baseline schedules: serial, back to back, greedy, one micro-batch at a time, interleaved, Chimera.

Interleaved 1F1B and Chimera cut or copy models, so they run their own instance; `run_baselines` returns the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from rlhf_planner.schedule.greedy import greedy
from rlhf_planner.schedule.instance import Instance, InstanceError, InstancePipeline
from rlhf_planner.schedule.simulate import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT,
    DeadlockError,
    InstanceArrays,
    Timeline,
    activation_peaks,
    instance_arrays,
    kernel_arguments,
    pad_orders,
    run_orders,
    simulate,
)

SERIAL = "serial-1f1b"
BACK_TO_BACK = "back-to-back-1f1b"
GREEDY = "greedy"
ONE_AT_A_TIME = "one-micro-batch-at-a-time"


def run_baselines(arrays: InstanceArrays) -> dict[str, Timeline]:
    """Return the schedules of the baselines that run within the memory cap, by name.

    One micro-batch at a time is included without a check. The arrays must not be split.
    """
    result: dict[str, Timeline] = {}
    for name, build in ((SERIAL, serial), (BACK_TO_BACK, back_to_back), (GREEDY, greedy)):
        try:
            timeline = build(arrays)
        except DeadlockError:  # a pipeline that visits a device twice may not run as 1F1B
            continue
        if keeps_cap(timeline):
            result[name] = timeline
    result[ONE_AT_A_TIME] = one_at_a_time(arrays)
    return result


def keeps_cap(timeline: Timeline) -> bool:
    """Return whether the peak is at most the instance's memory cap."""
    cap = timeline.arrays.instance.memory_cap
    return cap is None or timeline.peak <= cap + 1e-9


def check_cap_possible(instance: Instance) -> None:
    """Raise InstanceError if no schedule can stay within the cap: one micro-batch must fit on each device."""
    cap = instance.memory_cap
    if cap is None:
        return
    for index, pipe in enumerate(instance.pipelines):
        per_device = np.bincount(pipe.stage_devices, weights=pipe.activation)
        if per_device.max() > cap + 1e-9:
            where = (
                f"one micro-batch of pipelines[{index}] holds {per_device.max():g} on device {int(per_device.argmax())}"
            )
            raise InstanceError("memoryCap", cap, f"it is below one micro-batch ({where}), so nothing can run")


def phases(instance: Instance) -> list[list[int]]:
    """Return the pipelines' numbers, in order, in groups without shared devices, such as the copies of one model."""
    groups: list[list[int]] = []
    used: list[set[int]] = []
    for index, pipe in enumerate(instance.pipelines):
        devices = set(pipe.stage_devices)
        if groups and not (devices & used[-1]):
            groups[-1].append(index)
            used[-1] |= devices
        else:
            groups.append([index])
            used.append(devices)
    return groups


def one_f_one_b(arrays: InstanceArrays, pipeline: int) -> list[list[int]]:
    """Return the 1F1B order of one pipeline, one list of operations per device.

    Stage s warms up with at most stages - s - 1 forwards.
    """
    pipe = arrays.instance.pipelines[pipeline]
    cap = arrays.instance.memory_cap
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    limit = pipe.stages
    for k in np.flatnonzero(arrays.pipeline == pipeline):
        device, count = int(arrays.device[k]), pipe.microbatches
        if cap is not None and arrays.activation[k] > 0:
            limit = max(1, min(limit, int(cap / arrays.activation[k] + 1e-9)))
        warm = min(limit, pipe.stages - int(arrays.stage[k]), count) - 1
        forward, rest = KINDS * int(k), list(arrays.operations(int(k)))[1:]
        row = [forward] * warm
        for _ in range(count - warm):
            row += [forward, *rest]
        lists[device] += row + rest * warm
    return lists


def serial(arrays: InstanceArrays) -> Timeline:
    """Return the schedule of each pipeline as 1F1B, with barriers between the groups of `phases`."""
    return _with_barriers(arrays, one_f_one_b, "1F1B")


def _with_barriers(
    arrays: InstanceArrays, orders_of: Callable[[InstanceArrays, int], list[list[int]]], name: str
) -> Timeline:
    """Return the groups of `phases` one after another with barriers between them; `orders_of` gives a pipeline's
    orders."""
    start, offset = np.zeros(arrays.steps), 0.0
    merged: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    for group in phases(arrays.instance):
        lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
        for pipeline in group:
            lists = [a + b for a, b in zip(lists, orders_of(arrays, pipeline), strict=True)]
        begin = np.zeros(arrays.steps)
        makespan, done = run_orders(pad_orders(arrays, lists), *kernel_arguments(arrays), begin)
        if done != sum(len(row) for row in lists):
            raise DeadlockError(f"{name} of pipelines {group} waits for itself")
        for pipeline in group:
            for k in np.flatnonzero(arrays.pipeline == pipeline):
                block = slice(int(arrays.base[KINDS * k]), int(arrays.base[KINDS * k + KINDS]))
                start[block] = begin[block] + offset
        offset += makespan
        merged = [a + b for a, b in zip(merged, lists, strict=True)]
    orders = pad_orders(arrays, merged)
    return Timeline(arrays, orders, start, offset, activation_peaks(orders, arrays.activation, arrays.weight))


def back_to_back(arrays: InstanceArrays) -> Timeline:
    """Return the 1F1B schedules of the models one after another without a barrier, in the better of two orders.

    The orders are that of the instance and its reverse.
    """
    best: Timeline | None = None
    order = list(range(len(arrays.instance.pipelines)))
    for sequence in (order, order[::-1]):
        lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
        for pipeline in sequence:
            lists = [a + b for a, b in zip(lists, one_f_one_b(arrays, pipeline), strict=True)]
        timeline = simulate(arrays, pad_orders(arrays, lists))
        if best is None or timeline.rank < best.rank:
            best = timeline
    assert best is not None
    return best


def one_at_a_time(arrays: InstanceArrays) -> Timeline:
    """Return the schedule that starts a micro-batch on a device once the previous one has left it.

    It needs the least memory.
    """
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    for pipeline, pipe in enumerate(arrays.instance.pipelines):
        stages = [int(k) for k in np.flatnonzero(arrays.pipeline == pipeline)]
        for _ in range(pipe.microbatches):
            for k in stages:
                lists[int(arrays.device[k])].append(KINDS * k + FORWARD)
            for k in reversed(stages):
                lists[int(arrays.device[k])].append(KINDS * k + BACKWARD)
                if arrays.weight[k]:
                    lists[int(arrays.device[k])].append(KINDS * k + WEIGHT)
    return simulate(arrays, pad_orders(arrays, lists))


def interleaved(instance: Instance, chunks: int) -> Timeline | None:
    """Return interleaved 1F1B, one model after another with a barrier, with each stage cut into `chunks` virtual
    stages.

    Returns None where the construction does not apply. Source: Narayanan et al. 2021, section 2.2.
    """
    if chunks < 2 or any(p.microbatches % p.stages or p.stages < 2 for p in instance.pipelines):
        return None
    cut = tuple(_cut(pipe, chunks) for pipe in instance.pipelines)
    arrays = instance_arrays(replace(instance, pipelines=cut, memory_cap=None))
    return _with_barriers(arrays, partial(_interleaved_orders, chunks=chunks), "interleaved 1F1B")


def _cut(pipe: InstancePipeline, chunks: int) -> InstancePipeline:
    def part(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value / chunks for value in values) * chunks

    wrap = max(pipe.transfer, default=0.0)
    edges = (*pipe.transfer, wrap) * chunks
    return replace(
        pipe,
        stage_devices=pipe.stage_devices * chunks,
        forward=part(pipe.forward),
        backward=part(pipe.backward),
        weight_gradient=part(pipe.weight_gradient),
        activation=part(pipe.activation),
        transfer=edges[: pipe.stages * chunks - 1],
    )


def _interleaved_orders(arrays: InstanceArrays, pipeline: int, chunks: int) -> list[list[int]]:
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    stages = [int(k) for k in np.flatnonzero(arrays.pipeline == pipeline)]
    ranks = len(stages) // chunks
    total = arrays.instance.pipelines[pipeline].microbatches * chunks
    for rank in range(ranks):

        def operation(index: int, kind: int, rank: int = rank) -> int:
            chunk = index // ranks % chunks
            chunk = chunk if kind == FORWARD else chunks - 1 - chunk
            return KINDS * stages[chunk * ranks + rank] + kind

        warm = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        row = [operation(i, FORWARD) for i in range(warm)]
        for i in range(total - warm):
            row += [operation(warm + i, FORWARD), operation(i, BACKWARD)]
        row += [operation(i, BACKWARD) for i in range(total - warm, total)]
        lists[int(arrays.device[stages[rank]])] += row
    return lists


def chimera(instance: Instance) -> Timeline | None:
    """Return Chimera, one model after another: two copies of each, in opposite directions, share its micro-batches.

    Returns None for an odd number of stages or micro-batches. Source: Li and Hoefler 2021, with "direct concatenation".
    """
    if any(p.stages % 2 or p.microbatches % 2 for p in instance.pipelines):
        return None
    both: list[InstancePipeline] = []
    for pipe in instance.pipelines:
        half = replace(pipe, microbatches=pipe.microbatches // 2)
        flipped = {
            field: getattr(pipe, field)[::-1]
            for field in ("stage_devices", "forward", "backward", "weight_gradient", "activation", "transfer")
        }
        both += [half, replace(half, name=f"{pipe.name}-up", **flipped)]
    whole = replace(instance, pipelines=tuple(both), memory_cap=None)
    arrays = instance_arrays(whole)
    lists: list[list[int]] = [[] for _ in range(instance.devices)]
    for model, pipe in enumerate(instance.pipelines):
        left = pipe.microbatches // 2
        while left > 0:
            unit = min(left, pipe.stages // 2)
            _chimera_unit(arrays, model, unit, lists)
            left -= unit
    return simulate(arrays, pad_orders(arrays, lists))


def _chimera_unit(arrays: InstanceArrays, model: int, unit: int, lists: list[list[int]]) -> None:
    """Append one unit of both directions, in Chimera's slots, which do not collide for an even depth D.

    Stage s runs forward m in slot s + 2m and backward m in slot 2D - 1 - s + 2m, in both directions.
    """
    slots: list[list[tuple[int, int]]] = [[] for _ in lists]
    for k in np.flatnonzero(arrays.pipeline // 2 == model):
        depth, stage = arrays.instance.pipelines[2 * model].stages, int(arrays.stage[k])
        row = slots[int(arrays.device[k])]
        row += [(stage + 2 * m, KINDS * int(k) + FORWARD) for m in range(unit)]
        row += [(2 * depth - 1 - stage + 2 * m, KINDS * int(k) + BACKWARD) for m in range(unit)]
    for orders, slotted in zip(lists, slots, strict=True):
        orders += [operation for _, operation in sorted(slotted)]
