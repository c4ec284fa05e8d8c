"""Lowers the peak while the makespan stays within a limit: the second objective of the search.

Sets the search's floor, the proven bound on the peak. The bound over all devices comes last, so no schedule depends on
it.
"""

from __future__ import annotations

import numpy as np

from rlhf_planner.schedule.anneal import COLD, HOT, Walk, memory_units
from rlhf_planner.schedule.bounds import peak_bound
from rlhf_planner.schedule.exact import EXACT_STEPS, GRACE, decide, device_peak_bound
from rlhf_planner.schedule.peak_relaxation import least_seconds, relaxed_peak_bound
from rlhf_planner.schedule.search_state import TRIES_A_STEP, Search, anneal_in_chunks, tune
from rlhf_planner.schedule.simulate import Timeline

_PROOF = 0.12  # share of the budget for the bound over all devices, by the clock, so that it uses no tries
_PROBES = 4  # short walks that bracket the peak
# Long walks: share of the tries, and how far below the best they aim.
_ROUNDS = ((0.2, 0.02), (0.22, 0.01), (0.22, 0.005), (0.24, 0.0))


def lower_peak(search: Search, fast: Timeline) -> None:
    """Lower the peak at the best makespan (plus the allowed slack); do nothing if that is shorter than `fast`."""
    limit = max(search.best.makespan * (1 + search.options.makespan_slack), fast.makespan)
    if search.best.makespan < fast.makespan:  # a baseline is shorter than any schedule of this layout
        return
    search.floor = _peak_floor(search, limit)
    proof = _PROOF if search.options.seconds * _PROOF >= least_seconds(search.arrays, limit) else 0.0
    search.reserved = 0.0 if search.peak_at_floor else proof
    if search.tries_left < TRIES_A_STEP * search.arrays.steps:
        _list_down(search, limit)
    else:
        _anneal_down(search, fast, limit)
    search.reserved = 0.0
    if not search.peak_at_floor:
        nominal = proof * search.options.seconds
        relaxed = relaxed_peak_bound(search.arrays, limit, search.best.peak, nominal, search.left + GRACE)
        search.floor = max(search.floor, relaxed.bound)
    search.peak_cut = not search.peak_at_floor


def _list_down(search: Search, limit: float) -> None:
    """Run list scheduling under ever lower caps while the limit is met, where the tries are too few to anneal."""
    while not search.peak_at_floor and not search.stopped() and search.share_left > 0.05:
        if not tune(search, max(search.floor, 0.95 * search.best.peak), limit, 0.25):
            return


def _anneal_down(search: Search, fast: Timeline, limit: float) -> None:
    """Run short walks that bracket the reachable peak, then long ones that aim below it; small instances also
    exactly."""
    units, small = memory_units(search.arrays), search.arrays.steps <= EXACT_STEPS // 4
    if small:
        _exact_peak(search, limit, search.floor, 0.15, dynamic=False)
    low, total = units.from_activation(search.floor), search.tries_left * 2 // 3 if small else search.tries_left
    for round_ in range(_PROBES + len(_ROUNDS)):
        best = units.from_activation(search.best.peak)
        if search.peak_at_floor or search.stopped() or search.tries_left <= 0:
            return
        if round_ < _PROBES:  # short walks bracket the reachable peak
            share, target = 0.03, (low + best) // 2
        else:  # long ones aim just below the best
            share, under = _ROUNDS[round_ - _PROBES]
            target = min(best - 1, int(best * (1 - under)))
        walk = Walk(fast, limit, search.options.seed + round_)
        met = _descend(search, walk, max(target, units.from_activation(search.floor)), int(total * share))
        if not met and round_ < _PROBES:
            low = max(low, target)
    if small:
        _bisect_peak(search, limit, units.from_activation(search.floor))


def _bisect_peak(search: Search, limit: float, low: int) -> None:
    """Ask the exact solver for peaks between `low` (memory units, not reached so far) and the best."""
    units = memory_units(search.arrays)
    while low < units.from_activation(search.best.peak) - 1 and not search.peak_at_floor:
        target = (low + units.from_activation(search.best.peak)) // 2
        if _exact_peak(search, limit, target / units.scale, 0.4 * search.share_left, dynamic=True):
            low = max(low, target)
        if search.share_left < 0.02 or search.stopped():
            return


def _descend(search: Search, walk: Walk, target: int, tries: int) -> bool:
    """Run one walk; each time the target is met, aim about 1% lower at the same temperature.

    Return whether the first was met.
    """
    spent, met, floor = 0, False, walk.units.from_activation(search.floor)
    devices = search.arrays.instance.devices
    while spent < tries and not search.stopped() and search.tries_left > 0:
        before = search.tries_left
        hot = HOT * (COLD / HOT) ** (spent / tries)
        reached = anneal_in_chunks(search, walk, np.full(devices, target, dtype=np.int64), hot, COLD, tries - spent)
        spent += max(before - search.tries_left, 1)
        search.take(walk.timeline(), "annealing")
        met = met or reached
        peak = int(walk.peaks().max())
        if not reached or peak <= floor:
            break
        target = max(floor, peak - max(1, peak // 100))
    return met


def _exact_peak(search: Search, limit: float, peak: float, share: float, dynamic: bool) -> bool:
    """Ask the exact solver for a schedule with at most this peak; return whether none was found.

    A proof raises the floor.
    """
    if search.peak_at_floor or search.stopped():
        return True
    effort = search.effort(share)
    answer = decide(search.arrays, limit, peak, effort, search.left, search.options.seed, dynamic)
    search.spend_effort(answer.effort)
    if answer.timeline is not None:
        search.take(answer.timeline, "constraint programming")
        return False
    if answer.infeasible:
        search.floor = max(search.floor, peak + 1 / memory_units(search.arrays).scale)
    return True


def _peak_floor(search: Search, limit: float) -> float:
    """Return the best proven bound on the peak of a schedule with makespan `limit`."""
    arrays = search.arrays
    floor = peak_bound(arrays, limit)
    if arrays.steps > EXACT_STEPS:
        return floor
    effort = search.effort(0.1)
    search.spend_effort(effort)
    for device in range(arrays.instance.devices):
        if search.left > 0.2 * search.limit:
            bound = device_peak_bound(arrays, device, limit, effort / arrays.instance.devices, search.left)
            floor = max(floor, bound)
    return floor
