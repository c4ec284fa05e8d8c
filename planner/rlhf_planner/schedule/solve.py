"""The search: shortest makespan, then least peak activation, then least sum of peaks; never above the memory cap.

What it does, in order, each part stopping as soon as a bound is met:
  1. baselines, which every answer must match or beat (and fall back to);
  2. list scheduling without a cap, which often meets the makespan bound outright;
  3. constraint programming for the makespan, where the instance is small enough: a shorter schedule or a higher bound;
  4. annealing of memory at a fixed makespan, under the cap first (at the least makespan where that works), then as
  low as
     it goes, with the proven bound on the peak as the floor.
Effort is counted in tries and in deterministic solver time, at a nominal rate for `seconds`; the clock handed in is
only a backstop. So the same instance, options and seed give the same schedule on any machine that is not slower than
nominal; on one that is, the search is cut short, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlhf_planner.schedule.anneal import COLD, HOT, Walk, memory_units
from rlhf_planner.schedule.baselines import check_cap_possible, keeps_cap, one_at_a_time, run_baselines
from rlhf_planner.schedule.bounds import makespan_bound, peak_bound
from rlhf_planner.schedule.exact import EXACT_STEPS, decide, device_peak_bound, minimise_makespan, next_time
from rlhf_planner.schedule.listing import listed
from rlhf_planner.schedule.problem import Instance, InstanceError
from rlhf_planner.schedule.simulate import Layout, Timeline, layout

TRIES_A_SECOND = 4_000_000  # nominal rate of the annealing; an idle core of 2020 does twice that
CHUNK = 1_000_000  # tries between two looks at the clock
_DECISIONS = 12  # makespans that the exact solver is asked for, each with up to 8% of the budget
_PROBES = 4  # short walks that bracket the peak
_ROUNDS = ((0.22, 0.02), (0.28, 0.01), (0.38, 0.0))  # long walks: share of the tries, how far under the best they aim
SLACKS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)  # makespans tried under a cap, above the least


@dataclass(frozen=True, slots=True)
class Options:
    """`seconds`: time budget. `makespan_slack`: share of the makespan that may be given away for a lower peak."""

    seconds: float = 10.0
    split: bool = False
    seed: int = 0
    makespan_slack: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise InstanceError("seconds", self.seconds, "give a time budget above 0")
        if not 0 <= self.makespan_slack < float("inf"):
            raise InstanceError("makespanSlack", self.makespan_slack, "give a share of at least 0, such as 0.03")


@dataclass(frozen=True)
class Solution:
    """A valid schedule with what is proven about it. `lower_bound` and `peak_bound` hold for every schedule (for the
    peak:
    every schedule of this makespan)."""

    timeline: Timeline
    method: str
    lower_bound: float
    peak_bound: float
    seconds: float
    cut_short: bool
    baselines: dict[str, Timeline]

    @property
    def at_bound(self) -> bool:
        return self.timeline.makespan <= self.lower_bound * (1 + 1e-9)

    @property
    def peak_at_bound(self) -> bool:
        return self.timeline.peak <= self.peak_bound + 1e-9


@dataclass
class _Search:
    """One search under way: its budget, its best schedule and what is proven so far."""

    lay: Layout
    options: Options
    clock: Callable[[], float]
    best: Timeline
    method: str
    bound: float
    began: float
    cut_short: bool = False
    floor: float = 0.0
    tries_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.tries_left = int(self.options.seconds * TRIES_A_SECOND)

    @property
    def cap(self) -> float | None:
        return self.lay.instance.memory_cap

    @property
    def peak_at_floor(self) -> bool:
        return self.best.peak <= self.floor + 1e-9

    @property
    def left(self) -> float:
        return self.options.seconds - (self.clock() - self.began)

    @property
    def share_left(self) -> float:
        """Share of the budget that is left, counted in tries."""
        return max(0.0, self.tries_left / (self.options.seconds * TRIES_A_SECOND))

    def effort(self, share: float) -> float:
        """Effort for the exact solver: a share of the whole budget, or what is left."""
        return min(share, self.share_left) * self.options.seconds

    def spend(self, effort: float) -> None:
        """Take what the exact solver used from the tries."""
        self.tries_left -= int(effort * TRIES_A_SECOND)

    def offer(self, timeline: Timeline, method: str) -> bool:
        """Take the schedule if it keeps the cap and is better."""
        if not keeps_cap(timeline) or timeline.rank >= self.best.rank:
            return False
        self.best, self.method = timeline, method
        return True


def solve(instance: Instance, options: Options, clock: Callable[[], float]) -> Solution:
    """The best schedule found within the budget; never worse than the best baseline. InstanceError: the cap cannot
    be kept.

    `clock` gives seconds, such as time.monotonic.
    """
    began = clock()
    check_cap_possible(instance)
    plain = layout(instance)
    baselines = run_baselines(plain)
    name = min(baselines, key=lambda key: baselines[key].rank)
    lay = layout(instance, True) if options.split else plain
    search = _Search(lay, options, clock, baselines[name], name, makespan_bound(lay), began)
    for timeline in listed(lay, instance.memory_cap)[:1]:
        search.offer(timeline, "list scheduling")
    fast = _fastest(search)
    search.offer(fast, "list scheduling")
    if not keeps_cap(fast):
        _fit_under_cap(search, fast)
    _lower_peak(search, fast)
    return Solution(
        timeline=search.best,
        method=search.method,
        lower_bound=search.bound,
        peak_bound=search.floor,
        seconds=clock() - began,
        cut_short=search.cut_short,
        baselines=baselines,
    )


def _fastest(search: _Search) -> Timeline:
    """The shortest schedule found without regard to memory, of the search's layout; raises the bound on the way."""
    lay, options = search.lay, search.options
    fast = listed(lay, None)[0]
    if lay.steps > EXACT_STEPS or fast.makespan <= search.bound * (1 + 1e-9):
        return fast
    low = ask = search.bound  # below `low` there is nothing, or nothing that was found
    for _ in range(_DECISIONS):
        answer = decide(lay, ask, None, search.effort(0.08), search.left, options.seed)
        search.spend(answer.effort)
        if answer.timeline is not None:
            fast = answer.timeline
            search.offer(fast, "constraint programming")
        else:
            low = max(low, next_time(lay, ask))
        if answer.infeasible:
            search.bound = low = max(search.bound, next_time(lay, ask))
        if low >= fast.makespan * (1 - 1e-9) or search.left <= 0:
            break
        ask = low if answer.infeasible else (low + fast.makespan) / 2
    return fast


def _fit_under_cap(search: _Search, fast: Timeline) -> None:
    """The least makespan at which annealing brings memory under the cap; where small, exactly."""
    lay, options, cap = search.lay, search.options, search.cap
    assert cap is not None
    if lay.steps <= EXACT_STEPS // 4:
        start = search.best if search.best.layout is lay else one_at_a_time(lay)
        answer = minimise_makespan(lay, search.bound, start, cap, search.effort(0.3), search.left, options.seed)
        search.spend(answer.effort)
        search.bound = max(search.bound, answer.bound)
        if answer.timeline is not None:
            search.offer(answer.timeline, "constraint programming")
    budget = search.tries_left // 2
    failed = -1
    order = [3, 0, 1, 2, 4, 5, 6, 7, 8]  # one in a hundred first: most caps that can be kept at all can be kept there
    for rank in order:
        limit = fast.makespan * (1 + SLACKS[rank])
        if rank < failed or limit >= search.best.makespan or search.left <= 0:
            continue
        walk = Walk(fast, limit, options.seed + rank)
        targets = np.full(lay.instance.devices, walk.units.of(cap), dtype=np.int64)
        if _anneal(search, walk, targets, HOT, COLD, budget // 4):
            search.offer(walk.timeline(), "annealing under the cap")
        else:
            failed = max(failed, rank)


def _anneal(search: _Search, walk: Walk, targets: np.ndarray, hot: float, cold: float, tries: int) -> bool:
    """Run a walk in chunks until every device is at its target, the tries are used up or the clock has run out."""
    made, tries = 0, min(tries, search.tries_left)
    while made < tries:
        if search.left <= 0:
            search.cut_short = True
            return False
        part = min(CHUNK, tries - made)
        a, b = (hot * (cold / hot) ** (at / tries) for at in (made, made + part))
        above, used = walk.run(targets, a, b, part)
        made += part if above else used
        search.tries_left -= used
        if above == 0:
            return True
    return False


def _lower_peak(search: _Search, fast: Timeline) -> None:
    """Bring the peak down at the best makespan (plus the slack allowed), by annealing and, where small, exactly."""
    limit = max(search.best.makespan * (1 + search.options.makespan_slack), fast.makespan)
    if search.best.makespan < fast.makespan:  # a baseline is shorter than anything of this layout
        return
    search.floor = _peak_floor(search, limit)
    units, small = memory_units(search.lay), search.lay.steps <= EXACT_STEPS // 4
    if small:
        _exact_peak(search, limit, search.floor, 0.08)
    low, total = units.of(search.floor), search.tries_left // 2 if small else search.tries_left
    for round_ in range(_PROBES + len(_ROUNDS)):
        best = units.of(search.best.peak)
        if search.peak_at_floor or search.left <= 0 or search.tries_left <= 0:
            return
        if round_ < _PROBES:  # short walks bracket what can be reached
            share, target = 0.03, (low + best) // 2
        else:  # long ones aim just under the best
            share, under = _ROUNDS[round_ - _PROBES]
            target = min(best - 1, int(best * (1 - under)))
        walk = Walk(fast, limit, search.options.seed + round_)
        if not _descend(search, walk, max(target, units.of(search.floor)), int(total * share)):
            low = max(low, target)
    while small and units.of(search.floor) <= low < units.of(search.best.peak) - 1:
        target = (low + units.of(search.best.peak)) // 2
        if _exact_peak(search, limit, target / units.scale, 0.4 * search.share_left):
            low = max(low, target)
        if search.share_left < 0.02 or search.left <= 0:
            return


def _descend(search: _Search, walk: Walk, target: int, tries: int) -> bool:
    """One walk: whenever the target is met, aim 1% lower at the same temperature. Whether the first target was met."""
    made, met, floor = 0, False, walk.units.of(search.floor)
    devices = search.lay.instance.devices
    while made < tries and search.left > 0 and search.tries_left > 0:
        before = search.tries_left
        hot = HOT * (COLD / HOT) ** (made / tries)
        reached = _anneal(search, walk, np.full(devices, target, dtype=np.int64), hot, COLD, tries - made)
        made += max(before - search.tries_left, 1)
        _take(search, walk.timeline(), "annealing")
        met = met or reached
        peak = int(walk.peaks().max())
        if not reached or peak <= floor:
            break
        target = max(floor, peak - max(1, peak // 100))
    return met


def _exact_peak(search: _Search, limit: float, peak: float, share: float) -> bool:
    """Ask the exact solver for a schedule with at most this peak; true if none was found. A proof raises the floor."""
    if search.peak_at_floor or search.left <= 0:
        return True
    answer = decide(search.lay, limit, peak, search.effort(share), search.left, search.options.seed)
    search.spend(answer.effort)
    if answer.timeline is not None:
        _take(search, answer.timeline, "constraint programming")
        return False
    if answer.infeasible:
        search.floor = max(search.floor, peak + 1 / memory_units(search.lay).scale)
    return True


def _take(search: _Search, timeline: Timeline, method: str) -> None:
    """With slack a lower peak is worth a longer makespan; without, the usual order decides."""
    if search.options.makespan_slack > 0 and keeps_cap(timeline) and timeline.peak < search.best.peak - 1e-9:
        search.best, search.method = timeline, method
    else:
        search.offer(timeline, method)


def _peak_floor(search: _Search, limit: float) -> float:
    """The best proven bound on the peak of a schedule with makespan `limit`."""
    lay = search.lay
    floor = peak_bound(lay, limit)
    if lay.steps > EXACT_STEPS:
        return floor
    effort = search.effort(0.1)
    search.spend(effort)
    for device in range(lay.instance.devices):
        if search.left > 0.2 * search.options.seconds:
            bound = device_peak_bound(lay, device, limit, effort / lay.instance.devices, search.left)
            floor = max(floor, bound)
    return floor
