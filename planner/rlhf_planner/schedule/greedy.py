"""The published greedy schedule: earliest start, never delay the largest model, ties to backward.

It ignores the memory cap. Source: RLHFuse (arXiv 2409.13221), initial solution of its annealing.
"""

from __future__ import annotations

import numpy as np

from rlhf_planner.schedule.compiled import compiled
from rlhf_planner.schedule.simulate import (
    KINDS,
    Bools,
    Floats,
    InstanceArrays,
    Ints,
    Timeline,
    feeder,
    kernel_arguments,
    pad_orders,
    simulate,
)


def largest_pipeline(arrays: InstanceArrays) -> int:
    """Return the number of the pipeline with the most work; the first one on ties."""
    operation = np.repeat(arrays.pipeline, KINDS)
    work = np.bincount(operation, weights=np.diff(arrays.base) * arrays.duration)
    return int(np.argmax(work))


def greedy(arrays: InstanceArrays) -> Timeline:
    """Return the greedy schedule; the arrays must not be split."""
    ranked = np.lexsort(
        (arrays.pipeline, arrays.device)
    )  # candidates are visited device by device, then pipeline by pipeline
    sequence = greedy_sequence(*kernel_arguments(arrays), arrays.pipeline == largest_pipeline(arrays), ranked)
    lists: list[list[int]] = [[] for _ in range(arrays.instance.devices)]
    for op in sequence:
        lists[int(arrays.device[op // KINDS])].append(int(op))
    return simulate(arrays, pad_orders(arrays, lists))


@compiled
def greedy_sequence(  # noqa: C901  one flat loop, compiled
    duration: Floats,
    device: Ints,
    microbatches: Ints,
    base: Ints,
    before: Ints,
    after: Ints,
    lag_before: Floats,
    lag_after: Floats,
    weight: Bools,
    large: Bools,
    ranked: Ints,
) -> Ints:
    """Return the operations in the order in which the greedy algorithm commits them, int64 [steps].

    Arrays are those of `kernel_arguments`. `large` bool [stages] marks the stages of the largest pipeline; `ranked`
    int64 [stages] is the order of candidates.
    """
    stages = len(device)
    devices = device.max() + 1
    idle = np.zeros(devices)
    count = np.zeros(3 * stages, np.int64)
    start = np.zeros(base[-1])
    sequence = np.empty(base[-1], np.int64)
    begin = np.empty(3 * stages)
    first_large = np.empty(devices)
    for n in range(base[-1]):
        first_large[:] = np.inf
        for k in range(stages):
            for kind in range(2):
                op = 3 * k + kind
                begin[op] = np.inf
                m = count[op]
                if m >= microbatches[k]:
                    continue
                other = feeder(op, before[k], after[k])
                if (kind == 1 and count[op - 1] <= m) or (other >= 0 and count[other] <= m):
                    continue
                ready = 0.0
                if other >= 0:
                    ready = start[base[other] + m] + duration[other] + (lag_before[k] if kind == 0 else lag_after[k])
                elif kind == 1:
                    ready = start[base[op - 1] + m] + duration[op - 1]
                begin[op] = max(ready, idle[device[k]])
                if large[k]:
                    first_large[device[k]] = min(first_large[device[k]], begin[op])
        best = -1
        for k in ranked:
            for kind in (1, 0):
                op = 3 * k + kind
                if begin[op] == np.inf or (not large[k] and begin[op] + duration[op] > first_large[device[k]]):
                    continue
                if best < 0 or begin[op] < begin[best] or (begin[op] == begin[best] and kind > best % 3):
                    best = op
        m = count[best]
        start[base[best] + m] = begin[best]
        idle[device[best // 3]] = begin[best] + duration[best]
        count[best] = m + 1
        sequence[n] = best
    return sequence
