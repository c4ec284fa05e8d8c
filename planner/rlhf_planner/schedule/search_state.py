"""State of one search: its options, its budget, the best schedule so far, and the proven bounds.

The budget is counted in effort (tries, deterministic solver time) at a nominal rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlhf_planner.schedule.anneal import Walk
from rlhf_planner.schedule.baselines import keeps_cap
from rlhf_planner.schedule.instance import InstanceError
from rlhf_planner.schedule.list_scheduling import EVALUATION, tuned
from rlhf_planner.schedule.simulate import InstanceArrays, Ints, Timeline

TRIES_A_SECOND = 6_000_000  # nominal rate of the annealing
SOLVER_RATE = 0.3  # nominal deterministic time of CP-SAT in one second
PATIENCE = 4.0  # the clock's limit, in budgets
TRIES_A_STEP = 2000  # with fewer tries per step, list scheduling takes the place of annealing
CHUNK = 250_000  # tries between two reads of the clock
PART = 5.0  # nominal seconds of list scheduling between two reads of the clock
_LEAST_SHARE = 0.005  # of the budget; a smaller share is not worth a call
OVERHEAD = 2e-3  # nominal seconds of one list schedule, in addition to its steps


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search: its budget in nominal `seconds`, and `makespan_slack`, the share of the makespan that may be
    given up for a lower peak."""

    seconds: float = 10.0
    split: bool = False
    seed: int = 0
    makespan_slack: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise InstanceError("seconds", self.seconds, "give a time budget above 0")
        if not 0 <= self.makespan_slack < float("inf"):
            raise InstanceError("makespanSlack", self.makespan_slack, "give a share of at least 0, such as 0.03")


@dataclass
class Search:
    """State of one search: its budget, its best schedule and the proven bounds."""

    arrays: InstanceArrays
    options: SearchOptions
    clock: Callable[[], float]
    best: Timeline
    method: str
    bound: float
    began: float
    by_clock: bool = False  # the clock ended a part before its effort: another machine may find another schedule
    floor: float = 0.0
    reserved: float = 0.0  # share of the clock's limit for parts that have not started
    peak_cut: bool = False  # the budget ended before the peak was proven minimal
    reached: float = 0.0  # seconds until the best makespan was found
    tries_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.tries_left = int(self.options.seconds * TRIES_A_SECOND)

    @property
    def cap(self) -> float | None:
        """Memory cap of the instance, in activation units; None means no cap."""
        return self.arrays.instance.memory_cap

    @property
    def peak_at_floor(self) -> bool:
        """Whether the best peak is at its proven lower bound."""
        return self.best.peak <= self.floor + 1e-9

    @property
    def left(self) -> float:
        """Seconds left by the clock, without reserved ones."""
        return (1 - self.reserved) * self.limit - (self.clock() - self.began)

    @property
    def limit(self) -> float:
        """Seconds after which the clock ends the search."""
        return PATIENCE * self.options.seconds

    @property
    def share_left(self) -> float:
        """Share of the budget that is left, counted in tries."""
        return max(0.0, self.tries_left / (self.options.seconds * TRIES_A_SECOND))

    def stopped(self, reserve: float = 0.0) -> bool:
        """Return whether the clock leaves at most `reserve`, a share of its limit, and record it."""
        late = self.left <= reserve * self.limit
        self.by_clock = self.by_clock or late
        return late

    def out_of(self, reserve: float) -> bool:
        """Return whether little more than `reserve`, a share of the budget, is left by tries, or `reserve` by the
        clock."""
        return self.share_left <= reserve + _LEAST_SHARE or self.stopped(reserve)

    def seconds(self, share: float) -> float:
        """Return the nominal seconds of a share of the whole budget, at most what is left."""
        return min(share, self.share_left) * self.options.seconds

    def spend(self, seconds: float) -> None:
        """Subtract nominal seconds used elsewhere from the tries."""
        self.tries_left -= int(seconds * TRIES_A_SECOND)

    def effort(self, share: float) -> float:
        """Return a share of the budget, at most what is left, in CP-SAT's deterministic time."""
        return self.seconds(share) * SOLVER_RATE

    def spend_effort(self, effort: float) -> None:
        """Subtract used deterministic time from the tries."""
        self.spend(effort / SOLVER_RATE)

    def offer(self, timeline: Timeline, method: str) -> bool:
        """Take the schedule if it is within the cap and better; return whether it was taken."""
        if not keeps_cap(timeline) or timeline.rank >= self.best.rank:
            return False
        if timeline.makespan < self.best.makespan:
            self.reached = self.clock() - self.began
        self.best, self.method = timeline, method
        return True

    def take(self, timeline: Timeline, method: str) -> None:
        """Take the schedule if better: with slack a lower peak outweighs a longer makespan, otherwise the usual order
        decides."""
        lower = timeline.peak < self.best.peak - 1e-9
        if self.options.makespan_slack > 0 and lower and keeps_cap(timeline):
            self.best, self.method = timeline, method
        else:
            self.offer(timeline, method)


def tune(search: Search, cap: float, enough: float, share: float) -> bool:
    """Run list scheduling under the cap with tuned rules, in chunks between reads of the clock.

    `share` is the share of the budget. Return whether a makespan of `enough` was reached.
    """
    arrays = search.arrays
    seconds = search.seconds(share)
    parts = max(1, round(seconds / PART))
    for part in range(parts):
        if search.stopped():
            return False
        evaluations = max(1, int(seconds / parts / (EVALUATION * arrays.steps + OVERHEAD)))
        result, evaluated = tuned(arrays, cap, enough, evaluations, search.options.seed + part)
        search.spend(evaluated * (EVALUATION * arrays.steps + OVERHEAD))
        if result is not None:
            search.take(result, "tuned list scheduling")
            if result.makespan <= enough * (1 + 1e-9):
                return True
    return False


def anneal_in_chunks(search: Search, walk: Walk, targets: Ints, hot: float, cold: float, tries: int) -> bool:
    """Run a walk in chunks until every device meets its target, the tries are used up or the time is over.

    `targets` int64 [devices] are in memory units. Return whether every device meets its target.
    """
    done, tries = 0, min(tries, search.tries_left)
    while done < tries:
        if search.stopped():
            return False
        part = min(CHUNK, tries - done)
        a, b = (hot * (cold / hot) ** (at / tries) for at in (done, done + part))
        above, used = walk.run(targets, a, b, part)
        done += part if above else used
        search.tries_left -= used
        if above == 0:
            return True
    return False
