"""Anneals activation memory under a hard limit on the makespan, by swaps of neighbouring steps.

Each step stores its head (earliest start) and its tail (least time from its start to the end), so each swap is checked
in constant time. The same seed and number of tries give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_planner.schedule.compiled import compiled, inlined
from rlhf_planner.schedule.simulate import KINDS, Floats, InstanceArrays, Ints, Timeline, simulate

HOT, COLD = 450.0, 0.02  # temperatures, in squared micro-batches above the target
STEP_COST = 0.6  # micro-batches added to every excess, so that a small excess is not free


# Columns of `links` [steps, 6]: integers of a step; -1 means no neighbour.
PREVIOUS = 0  # previous step of the same micro-batch
FOLLOWING = 1  # next step of the same micro-batch, unless that is a weight-gradient step
HELD = 2  # change of the device's memory, in memory units
OPERATION = 3
DEVICE = 4
POSITION = 5  # position in the order of its device
# Columns of `times` [steps, 5].
LAG_PREVIOUS = 0
LAG_FOLLOWING = 1
DURATION = 2
HEAD = 3  # earliest start
TAIL = 4  # least time from its start to the end of the schedule


@dataclass(frozen=True, slots=True)
class MemoryUnits:
    """Integer units of activation memory, so that peaks compare exactly."""

    scale: float  # memory units per activation unit
    mean: float  # memory units of an average micro-batch

    def from_activation(self, activation: float) -> int:
        """Return `activation`, in activation units of the instance, rounded down to memory units."""
        return int(np.floor(activation * self.scale + 1e-6))


def memory_units(arrays: InstanceArrays) -> MemoryUnits:
    """Return the coarsest decimal grid of up to four digits that represents every activation within 1e-9.

    Without one, the unit is a millionth of the largest activation.
    """
    for digits in range(5):
        scaled = arrays.activation * 10**digits
        if np.allclose(scaled, np.round(scaled), rtol=0, atol=1e-9):
            scale = float(10**digits)
            break
    else:
        scale = 1e6 / float(arrays.activation.max())
    return MemoryUnits(scale, max(float(np.mean(np.round(arrays.activation * scale))), 1.0))


class Walk:
    """One annealing walk over the schedules of an instance within a makespan limit.

    `order` int64 [devices, longest] contains steps, `holds` the device's memory after each of them, in memory units.
    """

    def __init__(self, timeline: Timeline, limit: float, seed: int) -> None:
        arrays = timeline.arrays
        self.arrays, self.units = arrays, memory_units(arrays)
        self.limit = limit * (1 + 1e-12) + 1e-9
        self.random = np.array([seed * 0x9E3779B97F4A7C15 % 2**64 or 1], dtype=np.uint64)
        self.links, self.times = _graph(arrays, self.units)
        self.order = _steps_in_order(arrays, timeline.orders)
        self.length = arrays.device_lengths
        self.holds = np.zeros(self.order.shape, dtype=np.int64)
        if fill_state(self.links, self.times, self.order, self.length, self.holds) != arrays.steps:
            raise ValueError("the schedule to start from deadlocks")

    def run(self, targets: Ints, hot: float, cold: float, tries: int) -> tuple[int, int]:
        """Try at most `tries` swaps, until no position is above its device's target.

        Return (positions still above it, tries made). `targets` int64 [devices] are in memory units.
        """
        state = (self.links, self.times, self.order, self.length, self.holds)
        return anneal(*state, self.limit, targets, 1.0 / self.units.mean, hot, cold, tries, self.random)

    def peaks(self) -> Ints:
        """Return the peak of every device, int64 [devices], in memory units."""
        used = np.arange(self.order.shape[1])[None, :] < self.length[:, None]
        return np.asarray(np.where(used, self.holds, 0).max(axis=1))

    def timeline(self) -> Timeline:
        """Return the current schedule of the walk, simulated."""
        return simulate(self.arrays, np.where(self.order >= 0, self.links[self.order, OPERATION], -1))


def _graph(arrays: InstanceArrays, units: MemoryUnits) -> tuple[Ints, Floats]:
    """Return `links` and `times` of a layout; `fill_state` sets positions, heads and tails."""
    links, times = np.full((arrays.steps, 6), -1, dtype=np.int64), np.zeros((arrays.steps, 5))
    counts = np.diff(arrays.base)
    links[:, HELD] = 0
    links[:, OPERATION] = np.repeat(np.arange(KINDS * arrays.stages), counts)
    links[:, DEVICE] = np.repeat(np.repeat(arrays.device, KINDS), counts)
    times[:, DURATION] = np.repeat(arrays.duration, counts)

    def join(earlier: int, later: int, lag: float, follow: bool = True) -> None:
        """Order every step of operation `later` after the same micro-batch's step of `earlier`."""
        a = np.arange(arrays.base[earlier], arrays.base[earlier + 1])
        b = np.arange(arrays.base[later], arrays.base[later + 1])
        links[b, PREVIOUS], times[b, LAG_PREVIOUS] = a, lag
        if follow:
            links[a, FOLLOWING], times[a, LAG_FOLLOWING] = b, lag

    for k in range(arrays.stages):
        forward, backward, weight = (KINDS * k + kind for kind in range(KINDS))
        amount = round(float(arrays.activation[k]) * units.scale)
        freeing = weight if arrays.weight[k] else backward
        links[arrays.base[forward] : arrays.base[forward + 1], HELD] = amount
        links[arrays.base[freeing] : arrays.base[freeing + 1], HELD] = -amount
        if arrays.after[k] >= 0:
            join(forward, forward + KINDS, float(arrays.lag_after[k]))
            join(backward + KINDS, backward, float(arrays.lag_after[k]))
        else:
            join(forward, backward, 0.0)
        if arrays.weight[k]:  # same device: the order places it after its input gradient, so it has no successor
            join(backward, weight, 0.0, follow=False)
    return links, times


def _steps_in_order(arrays: InstanceArrays, orders: Ints) -> Ints:
    count = np.zeros(KINDS * arrays.stages, dtype=np.int64)
    steps = np.full(orders.shape, -1, dtype=np.int64)
    for device, row in enumerate(orders):
        for place, op in enumerate(row):
            if op < 0:
                break
            steps[device, place] = arrays.base[op] + count[op]
            count[op] += 1
    return steps


@compiled
def fill_state(links: Ints, times: Floats, order: Ints, length: Ints, holds: Ints) -> int:
    """Compute positions, heads, tails and `holds` from the order; return the number of steps reached.

    All steps are reached unless the order deadlocks. `links` is int64 [steps, 6], `times` float64 [steps, 5]; the
    constants above name their columns.
    """
    count = len(links)
    waits = np.zeros(count, np.int64)
    also = np.full(count, -1)  # the weight-gradient step that waits for a step, in addition to its successor
    for d in range(len(length)):
        in_use = 0
        for i in range(length[d]):
            n = order[d, i]
            in_use += links[n, HELD]
            links[n, POSITION], holds[d, i] = i, in_use
            p = links[n, PREVIOUS]
            waits[n] = (1 if i > 0 else 0) + (1 if p >= 0 else 0)
            if p >= 0 and links[p, FOLLOWING] != n:
                also[p] = n
    reached = np.empty(count, np.int64)
    end = 0
    for n in range(count):
        if waits[n] == 0:
            reached[end] = n
            end += 1
    at = 0
    while at < end:
        n = reached[at]
        at += 1
        times[n, HEAD] = head_of(links, times, order, n)
        d, i = links[n, DEVICE], links[n, POSITION]
        neighbour = order[d, i + 1] if i + 1 < length[d] else -1
        for other in (links[n, FOLLOWING], also[n], neighbour):
            if other >= 0:
                waits[other] -= 1
                if waits[other] == 0:
                    reached[end] = other
                    end += 1
    for i in range(end - 1, -1, -1):
        times[reached[i], TAIL] = tail_of(links, times, order, length, reached[i])
    return end


@inlined
def head_of(links: Ints, times: Floats, order: Ints, n: int) -> float:
    """Return the earliest start of step `n`, in time units, from the heads of its predecessors.

    Arrays are as in `fill_state`.
    """
    head = 0.0
    p = links[n, PREVIOUS]
    if p >= 0:
        head = times[p, HEAD] + times[p, DURATION] + times[n, LAG_PREVIOUS]
    i = links[n, POSITION]
    if i > 0:
        neighbour = order[links[n, DEVICE], i - 1]
        head = max(head, times[neighbour, HEAD] + times[neighbour, DURATION])
    return head


@inlined
def tail_of(links: Ints, times: Floats, order: Ints, length: Ints, n: int) -> float:
    """Return the least time from the start of step `n` to the end of the schedule, from the tails of its successors.

    Arrays are as in `fill_state`.
    """
    tail = 0.0
    f = links[n, FOLLOWING]
    if f >= 0:
        tail = times[f, TAIL] + times[n, LAG_FOLLOWING]
    d, i = links[n, DEVICE], links[n, POSITION]
    if i + 1 < length[d]:
        tail = max(tail, times[order[d, i + 1], TAIL])
    return float(tail + times[n, DURATION])


@inlined
def try_swap(links: Ints, times: Floats, order: Ints, length: Ints, u: int, v: int, limit: float) -> bool:
    """Swap step `u` with its right neighbour `v` if no cycle can close and the makespan stays within `limit`.

    Return whether they were swapped. `spread` updates the heads and tails of other steps.
    """
    d, i = links[u, DEVICE], links[u, POSITION]
    p, f = links[v, PREVIOUS], links[u, FOLLOWING]
    if p == u or f == v or links[u, OPERATION] == links[v, OPERATION]:
        return False
    if p >= 0 and f >= 0 and times[p, HEAD] >= times[f, HEAD] + times[f, DURATION]:
        return False  # a path from u to v may exist
    head_v = 0.0
    if p >= 0:
        head_v = times[p, HEAD] + times[p, DURATION] + times[v, LAG_PREVIOUS]
    if i > 0:
        left = order[d, i - 1]
        head_v = max(head_v, times[left, HEAD] + times[left, DURATION])
    head_u = head_v + times[v, DURATION]
    p = links[u, PREVIOUS]
    if p >= 0:
        head_u = max(head_u, times[p, HEAD] + times[p, DURATION] + times[u, LAG_PREVIOUS])
    tail_u = 0.0
    if f >= 0:
        tail_u = times[f, TAIL] + times[u, LAG_FOLLOWING]
    if i + 2 < length[d]:
        tail_u = max(tail_u, times[order[d, i + 2], TAIL])
    tail_u += times[u, DURATION]
    tail_v = tail_u
    f = links[v, FOLLOWING]
    if f >= 0:
        tail_v = max(tail_v, times[f, TAIL] + times[v, LAG_FOLLOWING])
    tail_v += times[v, DURATION]
    if head_v + tail_v > limit or head_u + tail_u > limit:
        return False
    order[d, i], order[d, i + 1] = v, u
    links[v, POSITION], links[u, POSITION] = i, i + 1
    times[v, HEAD], times[u, HEAD] = head_v, head_u
    times[v, TAIL], times[u, TAIL] = tail_v, tail_u
    return True


@inlined
def spread(links: Ints, times: Floats, order: Ints, length: Ints, u: int, v: int, queue: Ints, queued: Ints) -> None:
    """Update the heads after, and the tails before, the swapped steps `v`, `u`.

    `queue` int64 [steps + 1] and `queued` int64 [steps] are scratch memory; `queued` is zero before and after.
    """
    room = len(queue)
    for side in (1, -1):
        link = FOLLOWING if side == 1 else PREVIOUS
        first, last = 0, 0
        d = links[u, DEVICE]
        i = links[u, POSITION] + 1 if side == 1 else links[v, POSITION] - 1
        neighbour = order[d, i] if 0 <= i < length[d] else -1
        for n in (neighbour, links[v, link], links[u, link]):
            if n >= 0 and queued[n] == 0:
                queue[last], queued[n] = n, 1
                last += 1
        while first != last:
            n = queue[first]
            first = first + 1 if first + 1 < room else 0
            queued[n] = 0
            if side == 1:
                value = head_of(links, times, order, n)
                if value == times[n, HEAD]:
                    continue
                times[n, HEAD] = value
            else:
                value = tail_of(links, times, order, length, n)
                if value == times[n, TAIL]:
                    continue
                times[n, TAIL] = value
            d, i = links[n, DEVICE], links[n, POSITION] + side
            neighbour = order[d, i] if 0 <= i < length[d] else -1
            for other in (neighbour, links[n, link]):
                if other >= 0 and queued[other] == 0:
                    queue[last], queued[other] = other, 1
                    last = last + 1 if last + 1 < room else 0


@inlined
def next_random(random: NDArray[np.uint64]) -> int:
    """Return the top 32 bits of the next number of xorshift64*; `random` uint64 [1] is its state."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return int((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(32))


@compiled
def anneal(
    links: Ints,
    times: Floats,
    order: Ints,
    length: Ints,
    holds: Ints,
    limit: float,
    targets: Ints,
    inverse: float,
    hot: float,
    cold: float,
    tries: int,
    random: NDArray[np.uint64],
) -> tuple[int, int]:
    """Try `tries` swaps at falling temperature; return (positions above target, tries made).

    The cost is the sum over positions above their target of (excess + STEP_COST)^2, with the excess in micro-batches.
    `holds` and `targets` (int64 [devices]) are in memory units, `inverse` is micro-batches per unit.
    """
    count = len(links)
    queue, queued = np.empty(count + 1, np.int64), np.zeros(count, np.int64)
    above = 0
    for d in range(len(length)):
        for i in range(length[d]):
            above += 1 if holds[d, i] > targets[d] else 0
    temperature = hot
    factor = (cold / hot) ** (1024.0 / max(tries, 1024))
    for done in range(tries):
        if above == 0:
            return above, done
        if done % 1024 == 1023:
            temperature *= factor
        u = next_random(random) % count
        d, i = links[u, DEVICE], links[u, POSITION]
        if i + 1 >= length[d]:
            continue
        v = order[d, i + 1]
        old = holds[d, i]
        new = old - links[u, HELD] + links[v, HELD]
        a, b = old - targets[d], new - targets[d]
        if b > 0 and b > a:
            worse = (b * inverse + STEP_COST) ** 2 - ((a * inverse + STEP_COST) ** 2 if a > 0 else 0.0)
            if next_random(random) >= 4294967296.0 * np.exp(-worse / temperature):
                continue
        if try_swap(links, times, order, length, u, v, limit):
            holds[d, i] = new
            above += (1 if b > 0 else 0) - (1 if a > 0 else 0)
            spread(links, times, order, length, u, v, queue, queued)
    return above, tries
