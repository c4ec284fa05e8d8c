"""The search: shortest makespan, then least peak activation, then least sum of peaks; never above the memory cap.

Effort is counted in tries and deterministic solver time, at a nominal rate for `seconds`. The clock ends parts of the
search at PATIENCE times `seconds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhf_planner.schedule.anneal import COLD, HOT, Walk
from rlhf_planner.schedule.baselines import check_cap_possible, keeps_cap, one_at_a_time, run_baselines
from rlhf_planner.schedule.bounds import makespan_bound
from rlhf_planner.schedule.exact import EXACT_STEPS, decide, minimise_makespan, next_time
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.list_scheduling import listed
from rlhf_planner.schedule.lower_peak import lower_peak
from rlhf_planner.schedule.search_state import TRIES_A_STEP, Search, SearchOptions, anneal_in_chunks, tune
from rlhf_planner.schedule.simulate import Timeline, instance_arrays

__all__ = ["Objective", "SearchOptions", "Solution", "solve"]

_DECISIONS = 12  # makespans per round of the exact solver
_FIRST_SHARE = 0.08  # of the budget, for each of them in the first round; twice as much in every later one
_ROUNDS = 5
_KEPT_FOR_PEAK = 0.2  # of the budget, if the makespan cannot be proven
_KEPT_FOR_CAP = 0.5  # the same under a cap, where a makespan counts only once memory is below it
SLACKS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)  # makespans tried under a cap, above the least


Objective = Literal["makespan", "peak"]


@dataclass(frozen=True)
class Solution:
    """A valid schedule and its proven bounds.

    `lower_bound` is on the makespan, `peak_bound` on the peak within this makespan plus the allowed slack.
    `makespan_seconds` is when the makespan was found; 0 for that of a baseline. `cut_short` names what more budget
    might still lower. `by_clock`: a faster machine may find another schedule.
    """

    timeline: Timeline
    method: str
    lower_bound: float
    peak_bound: float
    seconds: float
    makespan_seconds: float
    cut_short: Objective | None
    by_clock: bool
    baselines: dict[str, Timeline]

    @property
    def at_bound(self) -> bool:
        """Whether the makespan is at its proven lower bound."""
        return self.timeline.makespan <= self.lower_bound * (1 + 1e-9)

    @property
    def peak_at_bound(self) -> bool:
        """Whether the peak is at its proven lower bound."""
        return self.timeline.peak <= self.peak_bound + 1e-9


def solve(instance: Instance, options: SearchOptions, clock: Callable[[], float]) -> Solution:
    """Return the best schedule found within the budget; without slack it is never worse than the best baseline.

    `clock` returns seconds. Raises InstanceError if no schedule can stay within the cap.
    """
    began = clock()
    check_cap_possible(instance)
    plain = instance_arrays(instance)
    baselines = run_baselines(plain)
    name = min(baselines, key=lambda key: baselines[key].rank)
    arrays = instance_arrays(instance, True) if options.split else plain
    search = Search(arrays, options, clock, baselines[name], name, makespan_bound(arrays), began)
    for timeline in listed(arrays, instance.memory_cap)[:1]:
        search.offer(timeline, "list scheduling")
    fast = _fastest(search)
    search.offer(fast, "list scheduling")
    if not keeps_cap(fast):
        _fit_under_cap(search, fast)
    cut: Objective | None = "makespan" if _makespan_cut(search) else None
    lower_peak(search, fast)
    return Solution(
        timeline=search.best,
        method=search.method,
        lower_bound=search.bound,
        peak_bound=search.floor,
        seconds=clock() - began,
        makespan_seconds=search.reached,
        cut_short=cut or ("peak" if search.peak_cut else None),
        by_clock=search.by_clock,
        baselines=baselines,
    )


def _makespan_cut(search: Search) -> bool:
    """Return whether the best makespan is above the bound and more could have been tried."""
    tried_all = search.arrays.steps > EXACT_STEPS and search.cap is None
    return search.best.makespan > search.bound * (1 + 1e-9) and not tried_all


def _fastest(search: Search) -> Timeline:
    """Return the shortest schedule found, without regard to memory; raise the search's bound if possible.

    Above EXACT_STEPS no solver runs.
    """
    fast = listed(search.arrays, None)[0]
    if search.arrays.steps > EXACT_STEPS:
        return fast
    reserve = _KEPT_FOR_PEAK if search.cap is None else _KEPT_FOR_CAP
    share = _FIRST_SHARE
    for round_ in range(_ROUNDS):
        if fast.makespan <= search.bound * (1 + 1e-9) or search.out_of(reserve):
            break
        fast = _bisected(search, fast, share, reserve, search.options.seed + round_)
        share *= 2
    return fast


def _bisected(search: Search, fast: Timeline, share: float, reserve: float, seed: int) -> Timeline:
    """Return the shortest schedule of a bisection of makespans between the bound and `fast`.

    Each makespan gets up to `share` of the budget; `reserve` of it stays unused.
    """
    arrays = search.arrays
    low = ask = search.bound  # at or below `low` no schedule exists, or none was found
    for _ in range(_DECISIONS):
        effort, seconds = (
            search.effort(min(share, search.share_left - reserve)),
            search.left - reserve * search.limit,
        )
        answer = decide(arrays, ask, None, effort, seconds, seed)
        search.spend_effort(answer.effort)
        if answer.timeline is not None and answer.timeline.makespan < fast.makespan:
            fast = answer.timeline
            search.offer(fast, "constraint programming")
        else:
            low = max(low, next_time(arrays, ask))
        if answer.infeasible:
            search.bound = low = max(search.bound, next_time(arrays, ask))
        if low >= fast.makespan * (1 - 1e-9) or search.out_of(reserve):
            break
        ask = low if answer.infeasible else (low + fast.makespan) / 2
    return fast


def _fit_under_cap(search: Search, fast: Timeline) -> None:
    """Search for short schedules under the cap by tuning and annealing; in small instances also by constraint
    programming.
    """
    arrays, options, cap = search.arrays, search.options, search.cap
    assert cap is not None
    if arrays.steps <= EXACT_STEPS // 4:
        start = search.best if search.best.arrays is arrays else one_at_a_time(arrays)
        answer = minimise_makespan(arrays, search.bound, start, cap, search.effort(0.3), search.left, options.seed)
        search.spend_effort(answer.effort)
        search.bound = max(search.bound, answer.bound)
        if answer.timeline is not None:
            search.offer(answer.timeline, "constraint programming")
    tune(search, cap, fast.makespan, 0.4)
    if search.tries_left < TRIES_A_STEP * arrays.steps:
        return
    budget = int(search.tries_left * (1 - _KEPT_FOR_PEAK))
    failed = -1
    order = [3, 0, 1, 2, 4, 5, 6, 7, 8]  # 1% first
    for rank in order:
        limit = fast.makespan * (1 + SLACKS[rank])
        if rank < failed or limit >= search.best.makespan or search.stopped():
            continue
        walk = Walk(fast, limit, options.seed + rank)
        targets = np.full(arrays.instance.devices, walk.units.from_activation(cap), dtype=np.int64)
        if anneal_in_chunks(search, walk, targets, HOT, COLD, budget // 4):
            search.offer(walk.timeline(), "annealing under the cap")
        else:
            failed = max(failed, rank)
