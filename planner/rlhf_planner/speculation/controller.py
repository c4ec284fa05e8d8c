"""How far to draft, as the load changes: the choice of every step, and what is learned from it.

The law: of all numbers j of drafted tokens in a pass over R samples, the one with the most expected tokens a second,

    (R + survival of the best j slots) / (drafting + pass over R + j rows),

is taken, and j = 0, a plain step, is always among them. Whether drafters are asked at all is decided by the same law
over the drafts that they are expected to have, so where drafts do not pay nothing is spent on them. Acceptance, costs
and what drafters have are learned from the steps themselves (`acceptance`, `pass_costs`), and so is whose draft is
followed (`rival_drafts`); what was measured of whole steps corrects what is predicted of them (`step_records`). What is
not chosen is tried anew now and then: probes lose at most PROBE_SHARE of the time, as measured. A pass is never more
than GROWTH times wider than the widest that was measured. Pure: a state and numbers in, a choice or a new state out; no
clock, no chance, no engine.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_planner.speculation.acceptance import Acceptance, tokens_of
from rlhf_planner.speculation.draft_lengths import Best, best_of_supply, best_slots, lengths_of, supply_curve
from rlhf_planner.speculation.pass_costs import DraftCosts, PassCosts
from rlhf_planner.speculation.rival_drafts import PairwiseCounts, RivalDrafts
from rlhf_planner.speculation.step_records import StepRecords

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Reason = Literal["Unmeasured", "Faster", "Slower", "Probe"]
"""Unmeasured: too few steps were seen to know costs. Faster, Slower: drafts are expected to be. Probe: the alternative
is measured."""

FIRST_PLAIN: Final = 4
"""Steps without drafts at first: one alone, which finds everything cold, makes plain steps look slow for thousands."""
PROBE_SHARE: Final = 0.005
"""Share of the time that may be lost by measuring what is not chosen."""
PROBE_GAP: Final = 16
"""Steps between probes at least: what is learned by one is used before the next."""
PROBE_STEPS: Final = 2
"""Steps in a row of a probe of drafts: the first finds drafters and choosing cold, and takes longer for them."""
DOUBT: Final = 0.25
"""Part of an expected loss that a probe must be able to pay."""
PLAIN_GAP: Final = 128
"""Steps with drafts after which all that probes may lose is spent on a plain one; before, half of it."""
PROBE_REQUESTS: Final = 4
"""Samples that are drafted for in a probe: enough to learn by, and cheap at any batch."""
GROWTH: Final = 1.5
"""Widest pass beside the widest that was measured: beyond, costs are guesses."""
OVERHEAD_SHARE: Final = 0.05
"""Weight of a step in the overhead."""
OVERHEAD_FALLS: Final = 0.25
"""Weight of one that took less: it is what choosing takes, the others are what else the machine did meanwhile."""
FIRST_OVERHEAD: Final = 0.25
"""Of a pass: the most that the first step may say. What the machine did in one step would end drafts for thousands:
the less is drafted, the more seldom is it seen that choosing takes less."""
SUPPLY_WINDOW: Final = 256.0
"""Requests over which is averaged what drafters have."""


class Plan(NamedTuple):
    """What is asked for a step."""

    drafters: tuple[int, ...]
    """Those that are asked; none: a plain step."""
    requests: int
    """For how many samples at most."""
    slots: int
    """Most drafted tokens that are verified."""
    reason: Reason
    rate: float
    """Tokens a second that are expected; 0: unknown."""

    @property
    def probes(self) -> bool:
        """Whether this is not what is expected to be the fastest."""
        return self.reason == "Probe"


class Offered(NamedTuple):
    """Drafts of one drafter for the same n requests."""

    drafter: int
    matches: Ints
    """int64 [n]."""
    lengths: Ints
    """int64 [n], at most the controller's `longest`; 0: none."""


class Choice(NamedTuple):
    """Which drafts are verified, and how far."""

    drafters: Ints
    """int64 [n]: place of the drafter among those that offered."""
    lengths: Ints
    """int64 [n]."""


class MeasuredStep(NamedTuple):
    """A step as it was measured."""

    rows: int
    """Samples."""
    keys: int
    """Keys that they read without drafts."""
    slots: int
    """Drafted tokens that were verified."""
    tokens: int
    """That were drawn: one of each sample, and those of drafts that were accepted."""
    draft_seconds: float
    pass_seconds: float


class Outcomes(NamedTuple):
    """What became of drafts, int64 [n] each."""

    drafters: Ints
    matches: Ints
    drafted: Ints
    accepted: Ints


@dataclass(frozen=True)
class DraftController:
    """All that was learned. `supply` is float64 [sets, drafters, matches, positions]: for each set of drafters (each
    alone, then all together) the mean number of a request's slots; `supply_seen` [sets] requests stand behind it."""

    longest: int
    acceptance: Acceptance
    pass_costs: PassCosts
    draft_costs: DraftCosts
    records: StepRecords
    rivals: RivalDrafts
    supply: Floats
    supply_seen: Floats
    overhead: float = 0.0
    """Seconds of a step that asks drafters, beside what these take themselves: choosing among drafts."""
    credit: float = 0.0
    """Seconds that probes may lose."""
    since_probe: int = 0
    since_plain: int = 0
    """Steps since the last probe, and since the last plain step."""
    probing: int = 0
    """Most drafted tokens of the probe that is to follow the last step, which began one; 0: none is."""

    @classmethod
    def new(cls, drafters: int, matches: int, longest: int, widths: Ints) -> "DraftController":
        """Return a controller that knows nothing: drafts are taken to be free, and right every other time.

        `longest` tokens a draft; `widths` int64 [rows + 1] is how wide a pass over so many rows is.
        """
        sets = drafters + (drafters > 1)
        supply = np.zeros((sets, drafters, matches, longest))
        for index in range(sets):
            supply[index, min(index, drafters - 1), 0] = 1.0
        return cls(
            longest,
            Acceptance.unknown(drafters, matches, longest),
            PassCosts.unknown(widths),
            DraftCosts.unknown(drafters),
            StepRecords.empty(),
            RivalDrafts.unknown(drafters, matches),
            supply,
            np.ones(sets),
        )

    @property
    def drafters(self) -> int:
        """Number of drafters."""
        return int(self.supply.shape[1])

    def members(self, index: int) -> tuple[int, ...]:
        """Return the drafters of a set."""
        return (index,) if index < self.drafters else tuple(range(self.drafters))

    # ------------------------------------------------------------ choose

    def plan(self, rows: int, keys: int) -> Plan:
        """Return what to ask for a step over `rows` samples that read `keys` keys in all."""
        if self.pass_costs.steps < FIRST_PLAIN:
            return Plan((), 0, 0, "Unmeasured", 0.0)
        seconds = self.pass_costs.seconds(rows, self._limit(rows), keys)
        plain = float(seconds[0])
        chosen: tuple[int, ...] = ()
        best = Best(0, float(rows), plain)
        correction = self.records.correction(rows)
        corrected = seconds / correction
        corrected[0] = plain
        for index in range(len(self.supply)):
            asked = self.members(index)
            drafting = self._drafting(asked, rows) / correction
            found = best_of_supply(rows, self.acceptance.survival, self.supply[index] * rows, corrected, drafting)
            if found.slots and found.tokens * best.seconds > best.tokens * found.seconds:
                chosen, best = asked, found
        rate = best.tokens / best.seconds
        if probe := self._probe(rows, seconds, bool(chosen), rate):
            return probe
        if not chosen:
            return Plan((), 0, 0, "Slower", rate)
        return Plan(chosen, rows, len(seconds) - 1, "Faster", rate)

    def choose(self, plan: Plan, rows: int, keys: int, offers: tuple[Offered, ...]) -> Choice:
        """Return how far which drafts are followed; every offer is for the same requests, some of the `rows`."""
        survival = self.acceptance.survival
        winner = np.zeros(len(offers[0].lengths), np.int64)
        if len(offers) > 1:
            expected = np.stack([_expected(survival[offer.drafter], offer) for offer in offers])
            whose, matched, long = (np.stack(each) for each in zip(*offers, strict=True))
            winner = self.rivals.winner(whose, matched, long, expected)
        drafters, matches, lengths = _won(offers, winner)
        of_each = survival[drafters, matches]
        slots = min(plan.slots, int(lengths.sum()))
        if not plan.probes and slots:
            there = np.arange(self.longest) < lengths[:, None]
            best = -np.sort(-of_each[there])[:slots]
            seconds = self.pass_costs.seconds(rows, slots, keys)
            seconds[1:] /= self.records.correction(rows)
            slots = best_slots(rows, best, seconds, 0.0, float(seconds[0])).slots
        return Choice(winner, lengths_of(of_each, lengths, slots))

    # ------------------------------------------------------------ observe

    def offered(self, offers: tuple[Offered, ...], chosen: Choice, seconds: tuple[float, ...]) -> "DraftController":
        """Return what is known with the drafts that were made, each drafter's in so many seconds."""
        costs, supply, seen = self.draft_costs, self.supply.copy(), self.supply_seen.copy()
        for offer, took in zip(offers, seconds, strict=True):
            costs = costs.observed(offer.drafter, len(offer.lengths), self.longest, took)
            self._supplied(supply, seen, offer.drafter, (offer,), np.zeros(len(offer.lengths), np.int64))
        if len(offers) == self.drafters > 1:
            self._supplied(supply, seen, self.drafters, offers, chosen.drafters)
        return replace(self, draft_costs=costs, supply=supply, supply_seen=seen)

    def observe(self, plan: Plan, step: MeasuredStep, outcomes: Outcomes) -> "DraftController":
        """Return what is known with a step that was made by a plan."""
        seconds = max(step.draft_seconds + step.pass_seconds, 1e-9)
        pass_rows = step.rows + step.slots
        costs = self.pass_costs.observed(
            pass_rows,
            step.keys * pass_rows // max(step.rows, 1),
            step.slots > 0,
            max(step.pass_seconds, 1e-9),
        )
        records = self.records.observed(
            step.rows,
            step.slots,
            step.tokens,
            seconds,
            asked=bool(plan.drafters),
            # What a width costs that is measured for the first time was only a guess.
            predicted=0.0 if plan.probes or costs.widest > self.pass_costs.widest else plan.rate,
        )
        overhead = self.overhead
        # The first step after a plain one is no example of steps in which drafters are always asked.
        if plan.drafters and (self.since_plain or not overhead):
            beside = max(0.0, step.draft_seconds - self._drafters_seconds(plan.drafters, plan.requests))
            overhead = _overhead(overhead, beside, step.pass_seconds)
        credit = self.credit + PROBE_SHARE * seconds
        if plan.probes:
            credit -= max(0.0, seconds - step.tokens / plan.rate)
        return replace(
            self,
            acceptance=self.acceptance.observed(*outcomes),
            pass_costs=costs,
            records=records,
            overhead=overhead,
            credit=credit,
            since_probe=0 if plan.probes else self.since_probe + 1,
            since_plain=self.since_plain + 1 if plan.drafters else 0,
            probing=plan.slots if plan.probes and self.since_plain + 1 < PROBE_STEPS else 0,
        )

    def unlearned(self, steps: int, seconds: float, *, asked: bool) -> "DraftController":
        """Return what is known after steps of which nothing was learned; `asked`: drafters were."""
        return replace(
            self,
            credit=self.credit + PROBE_SHARE * seconds,
            since_probe=self.since_probe + steps,
            since_plain=self.since_plain + steps if asked else 0,
        )

    def aged(self) -> "DraftController":
        """Return what is known after an update of the policy's weights."""
        return replace(self, acceptance=self.acceptance.aged(), rivals=self.rivals.aged())

    def compared(self, duels: PairwiseCounts) -> "DraftController":
        """Return what is known with drafts of several drafters for the same places."""
        return replace(self, rivals=self.rivals.observed(duels))

    # ------------------------------------------------------------ parts

    def _limit(self, rows: int) -> int:
        """Most slots beside `rows` samples: the pass is not much wider than any measured one, or the next that is."""
        widths, seen = self.pass_costs.widths, max(self.pass_costs.widest, int(self.pass_costs.widths[rows]))
        above = min(int(np.searchsorted(widths, seen, side="right")), len(widths) - 1)
        widest = int(np.searchsorted(widths, max(GROWTH * seen, float(widths[above])), side="right")) - 1
        return max(0, min(rows * self.longest, widest - rows))

    def _drafting(self, asked: tuple[int, ...], requests: int) -> float:
        return self.overhead + self._drafters_seconds(asked, requests)

    def _drafters_seconds(self, asked: tuple[int, ...], requests: int) -> float:
        return sum(self.draft_costs.seconds(drafter, requests, self.longest) for drafter in asked)

    def _probe(self, rows: int, seconds: Floats, drafts: bool, rate: float) -> Plan | None:
        """Return a probe of what is not chosen, where one is due and can be paid for; `rate` is that of the choice."""
        if not self.probing and (self.since_probe < PROBE_GAP or self.credit <= 0):
            return None
        everybody = tuple(range(self.drafters))
        loss = float(seconds[0]) - rows / rate
        if drafts and loss <= self.credit / (2 if self.since_plain < PLAIN_GAP else 1):
            return Plan((), 0, 0, "Probe", rate)
        requests = rows if drafts else min(rows, PROBE_REQUESTS)
        slots = min(self.probing or requests * self.longest, len(seconds) - 1)
        took = self._drafting(everybody, requests) + seconds
        counts, gained = supply_curve(self.acceptance.survival, self.supply[-1] * requests)
        tokens = rows + np.interp(np.arange(len(seconds)), counts, gained)
        # What a probe is expected to lose is in doubt, or it would not be made; what it lost is taken from the credit.
        while slots and not self.probing and DOUBT * float(took[slots] - tokens[slots] / rate) > self.credit:
            slots //= 2
        return Plan(everybody, requests, slots, "Probe", rate) if slots else None

    def _supplied(self, supply: Floats, seen: Floats, index: int, offers: tuple[Offered, ...], winner: Ints) -> None:
        """Adds to `supply` of a set of drafters what its winners offered."""
        count = len(winner)
        if not count:
            return
        drafters, matches, lengths = _won(offers, winner)
        slots = tokens_of(drafters * supply.shape[2] + matches, lengths, supply.shape[1:])
        seen[index] = min(seen[index], SUPPLY_WINDOW)
        supply[index] = (supply[index] * seen[index] + slots) / (seen[index] + count)
        seen[index] += count


def _overhead(known: float, beside: float, pass_seconds: float) -> float:
    """Seconds that choosing takes, with a step more; `known` 0: none was seen."""
    if not known:
        return min(beside, FIRST_OVERHEAD * pass_seconds)
    share = OVERHEAD_FALLS if beside < known else OVERHEAD_SHARE
    return known + share * (min(beside, 4 * known) - known)


def _won(offers: tuple[Offered, ...], winner: Ints) -> tuple[Ints, Ints, Ints]:
    """(drafters, matches, lengths), [n] each, of the offer that won each request."""
    if len(offers) == 1:
        return np.full(len(winner), offers[0].drafter), offers[0].matches, offers[0].lengths
    place = np.arange(len(winner))
    matches, lengths = (np.stack(each)[winner, place] for each in zip(*(offer[1:] for offer in offers), strict=True))
    return np.array([offer.drafter for offer in offers])[winner], matches, lengths


def _expected(survival: Floats, offer: Offered) -> Floats:
    """Accepted tokens that are expected of each draft [n] of a drafter, by its survival [matches, positions]."""
    sums = np.concatenate([np.zeros((len(survival), 1)), survival.cumsum(axis=1)], axis=1)
    expected: Floats = sums[offer.matches, np.minimum(offer.lengths, survival.shape[1])]
    return expected
