"""Which prompts each iteration begins, and how many prompts wait for a later one. Rule: pure arithmetic.

The surplus prompts of `spec.rollout.oversample` are dropped, carried into the next iteration (`maxStaleness`), or
deferred to a long round (`longRounds`).

With long rounds, batch B and surplus M, of the first n iterations floor(M n / (B + M)) are long. A short round begins B
+ M prompts and defers M. A long round takes the B prompts that waited longest and begins none.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal

Surplus = Literal["Dropped", "Carried", "Deferred"]
"""Fate of prompts that are cut off."""


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """The prompts of each iteration of a job."""

    batch: int
    """Prompts of a batch."""
    extra: int = 0
    """Prompts of an iteration beyond those of its batch, unless it is a long round."""
    surplus: Surplus = "Dropped"
    begins: int = 0
    """First iteration of the schedule. No deferred prompt waits when it begins."""

    @property
    def period(self) -> int:
        """Iterations from one moment when no prompt waits to the next; 1 without long rounds."""
        if self.surplus != "Deferred":
            return 1
        return self.most // math.gcd(self.most, self.extra)

    @property
    def most(self) -> int:
        """Most prompts of an iteration."""
        return self.batch + self.extra

    @property
    def longest_wait(self) -> int:
        """Iterations within which a deferred prompt is taken up; 0 if none are deferred."""
        if self.surplus != "Deferred" or not self.extra:
            return 0
        return -(-self.most // self.batch) * -(-self.most // self.extra)

    def is_long(self, iteration: int) -> bool:
        """Return whether an iteration is a long round."""
        return self._long_before(iteration + 1) > self._long_before(iteration)

    def size(self, iteration: int) -> int:
        """Return the number of prompts of an iteration, with those that it takes up."""
        return self.batch if self.is_long(iteration) else self.most

    def first(self, iteration: int) -> int:
        """Return the number of an iteration's first place, counted over all passes through the prompt file.

        For a long round it is the first number of the next short round.
        """
        if self.surplus == "Carried":
            return iteration * self.batch
        return self.begins * self.batch + (iteration - self.begins - self._long_before(iteration)) * self.most

    def end(self, iteration: int) -> int:
        """Return how many prompts are begun by the end of an iteration, counted like `first`."""
        return self.first(iteration) + (0 if self.is_long(iteration) else self.most)

    def waiting(self, iteration: int) -> int:
        """Return how many deferred prompts wait when an iteration begins; 0 if none are deferred."""
        if self.surplus != "Deferred":
            return 0
        return (iteration - self.begins) * self.extra - self._long_before(iteration) * self.most

    def _long_before(self, iteration: int) -> int:
        return self.extra * (iteration - self.begins) // self.most if self.surplus == "Deferred" else 0


@dataclass(frozen=True, slots=True)
class PromptSchedules:
    """The schedules of a job's life, by first iteration. A job has one, unless `longRounds: Auto` changes it."""

    all: tuple[PromptSchedule, ...]

    def at(self, iteration: int) -> PromptSchedule:
        """Return the schedule in force in an iteration; the first one for iterations before it."""
        return self.all[max(0, bisect_right(self.all, iteration, key=lambda schedule: schedule.begins) - 1)]

    def may_change(self, iteration: int) -> bool:
        """Return whether no deferred prompt waits when an iteration begins, so that another schedule may begin."""
        return self.at(iteration).waiting(iteration) == 0

    def changed(self, iteration: int, extra: int) -> "PromptSchedules":
        """Return the schedules with `extra` surplus prompts from an iteration on; ValueError while prompts wait."""
        now = self.at(iteration)
        if not self.may_change(iteration):
            raise ValueError(f"{now.waiting(iteration)} prompts wait when iteration {iteration} begins")
        if now.extra == extra:
            return self
        before = tuple(schedule for schedule in self.all if schedule.begins < iteration)
        return PromptSchedules((*before, PromptSchedule(now.batch, extra, "Deferred", iteration)))


SURPLUS_SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of a batch near which `longRounds: Auto` chooses the number of surplus prompts."""
MAX_PERIOD: Final = 34
"""Longest period in iterations that `longRounds: Auto` considers: two of the smallest share."""


def possible_surpluses(batch: int, iterations: int) -> tuple[int, ...]:
    """Return the numbers of surplus prompts among which `longRounds: Auto` chooses, rising and without 0."""
    found = set()
    for share in SURPLUS_SHARES:
        near = range(max(1, math.ceil(batch * share * 2 / 3)), math.floor(batch * share * 3 / 2) + 1)
        short = [m for m in near if PromptSchedule(batch, m, "Deferred").period <= min(MAX_PERIOD, iterations)]
        if short:
            found.add(min(short, key=lambda m: (abs(m - batch * share), m)))
    return tuple(sorted(found))


def most_surplus(batch: int) -> int:
    """Return an upper bound of the surplus prompts that `longRounds: Auto` may choose."""
    return max(1, math.floor(batch * max(SURPLUS_SHARES) * 3 / 2))
