"""Decides how many tokens to draft in every step as the load changes, and learns from the results. Rule: pure.

In a pass over R samples the controller drafts the j tokens with the most expected tokens per second, (R + survival of
the best j slots) / (drafting + pass over R + j rows); j = 0 is a plain step. It probes alternatives on a credit of
PROBE_SHARE of the time.
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
Reason = Literal["Fixed", "Unmeasured", "Faster", "Slower", "Probe"]
"""Unmeasured: too few steps to know costs.

Faster, Slower: the expectation of drafts. Probe: measures the alternative.
"""

FIRST_PLAIN: Final = 4
"""Number of first steps without drafts."""
PROBE_SHARE: Final = 0.005
"""Share of the time that is added to the credit of probes."""
PROBE_GAP: Final = 16
"""Minimum steps between probes."""
PROBE_STEPS: Final = 2
"""Maximum consecutive steps of a probe of drafts."""
DOUBT: Final = 0.25
"""Share of an expected loss that the credit of probes must cover."""
PLAIN_GAP: Final = 128
"""Steps with drafts after which the whole credit may be spent on a plain step; before, half of it."""
PROBE_REQUESTS: Final = 4
"""Maximum number of samples to draft for in a probe while drafts are not expected to pay."""
GROWTH: Final = 1.5
"""Factor, on the widest measured or plain pass, up to which drafts may widen a pass. The next wider pass is allowed
too."""
OVERHEAD_SHARE: Final = 0.05
"""Weight of a step in the overhead."""
OVERHEAD_FALLS: Final = 0.25
"""Weight of a step with less overhead."""
FIRST_OVERHEAD: Final = 0.25
"""Maximum overhead that the first step may report, as a share of a pass."""
SUPPLY_WINDOW: Final = 256.0
"""Requests over which the supply of drafters is averaged."""


class Plan(NamedTuple):
    """Request for a step."""

    drafters: tuple[int, ...]
    """Drafters to ask; none means a plain step."""
    requests: int
    """Maximum number of samples to draft for."""
    slots: int
    """Maximum number of drafted tokens to verify."""
    reason: Reason
    rate: float
    """Expected tokens per second of the fastest option; 0 if unknown."""

    @property
    def probes(self) -> bool:
        """Whether this is a probe and not the option that is expected to be fastest."""
        return self.reason == "Probe"

    @property
    def verifies_all(self) -> bool:
        """Whether to verify as many drafted tokens as the plan allows, not only those that are expected to pay off."""
        return self.reason in ("Fixed", "Probe")


class Offered(NamedTuple):
    """Drafts of one drafter for the same n requests."""

    drafter: int
    matches: Ints
    """int64 [n] matches of the drafts."""
    lengths: Ints
    """int64 [n] tokens, at most the controller's `longest`; 0 means no draft."""


class Choice(NamedTuple):
    """Drafts to verify, and how many tokens of each."""

    drafters: Ints
    """int64 [n]: index of the drafter among the offers."""
    lengths: Ints
    """int64 [n]: tokens to verify."""


class MeasuredStep(NamedTuple):
    """Measurements of a step."""

    rows: int
    """Number of samples."""
    keys: int
    """Keys that the samples read without drafts."""
    slots: int
    """Number of verified drafted tokens."""
    tokens: int
    """Generated tokens: one per sample, plus the accepted tokens of drafts."""
    draft_seconds: float
    pass_seconds: float


class Outcomes(NamedTuple):
    """Results of drafts, int64 [n] each."""

    drafters: Ints
    matches: Ints
    drafted: Ints
    accepted: Ints


@dataclass(frozen=True)
class DraftController:
    """Everything that was learned, and the progress of probes.

    `supply` float64 [sets, drafters, matches, positions] is the running mean of a request's slots for each set of
    drafters, `supply_seen` [sets] its weight in requests.
    """

    longest: int
    acceptance: Acceptance
    pass_costs: PassCosts
    draft_costs: DraftCosts
    records: StepRecords
    rivals: RivalDrafts
    supply: Floats
    supply_seen: Floats
    overhead: float = 0.0
    """Seconds that a step needs to choose among drafts, without the drafters' own time."""
    credit: float = 0.0
    """Seconds that probes may lose."""
    since_probe: int = 0
    since_plain: int = 0
    """Steps since the last probe, and since the last plain step."""
    probing: int = 0
    """Maximum drafted tokens of a probe that the last step started and the next continues; 0 without one."""

    @classmethod
    def new(cls, drafters: int, matches: int, longest: int, widths: Ints) -> "DraftController":
        """Return a controller without observations. It assumes that drafts are free and right half of the time.

        `longest` is tokens per draft, `widths` int64 [rows + 1] the width of a pass by number of rows.
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
        """Return the request for a step over `rows` samples that read `keys` keys in total."""
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
        """Return which drafts to follow, and how far. All offers are for the same requests, some of the `rows`."""
        survival = self.acceptance.survival
        winner = np.zeros(len(offers[0].lengths), np.int64)
        if len(offers) > 1:
            expected = np.stack([_expected(survival[offer.drafter], offer) for offer in offers])
            whose, matched, long = (np.stack(each) for each in zip(*offers, strict=True))
            winner = self.rivals.winner(whose, matched, long, expected)
        drafters, matches, lengths = _won(offers, winner)
        of_each = survival[drafters, matches]
        slots = min(plan.slots, int(lengths.sum()))
        if not plan.verifies_all and slots:
            there = np.arange(self.longest) < lengths[:, None]
            best = -np.sort(-of_each[there])[:slots]
            seconds = self.pass_costs.seconds(rows, slots, keys)
            seconds[1:] /= self.records.correction(rows)
            slots = best_slots(rows, best, seconds, 0.0, float(seconds[0])).slots
        return Choice(winner, lengths_of(of_each, lengths, slots))

    # ------------------------------------------------------------ observe

    def offered(self, offers: tuple[Offered, ...], chosen: Choice, seconds: tuple[float, ...]) -> "DraftController":
        """Return a controller that has learned from these drafts, with each drafter's seconds."""
        costs, supply, seen = self.draft_costs, self.supply.copy(), self.supply_seen.copy()
        for offer, took in zip(offers, seconds, strict=True):
            costs = costs.observed(offer.drafter, len(offer.lengths), self.longest, took)
            self._supplied(supply, seen, offer.drafter, (offer,), np.zeros(len(offer.lengths), np.int64))
        if len(offers) == self.drafters > 1:
            self._supplied(supply, seen, self.drafters, offers, chosen.drafters)
        return replace(self, draft_costs=costs, supply=supply, supply_seen=seen)

    def observe(self, plan: Plan, step: MeasuredStep, outcomes: Outcomes) -> "DraftController":
        """Return a controller that has learned from a step made by a plan."""
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
            # The cost of a width that is measured for the first time was only a guess.
            predicted=0.0 if plan.probes or costs.widest > self.pass_costs.widest else plan.rate,
        )
        overhead = self.overhead
        # The first step after a plain one is not typical for steps that always ask drafters.
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
        """Return a controller after steps that taught nothing; `asked` is whether they asked drafters."""
        return replace(
            self,
            credit=self.credit + PROBE_SHARE * seconds,
            since_probe=self.since_probe + steps,
            since_plain=self.since_plain + steps if asked else 0,
        )

    def aged(self) -> "DraftController":
        """Return a controller after an update of the policy's weights."""
        return replace(self, acceptance=self.acceptance.aged(), rivals=self.rivals.aged())

    def compared(self, duels: PairwiseCounts) -> "DraftController":
        """Return a controller that has learned from several drafters' drafts for the same places."""
        return replace(self, rivals=self.rivals.observed(duels))

    # ------------------------------------------------------------ parts

    def _limit(self, rows: int) -> int:
        """Return the maximum slots with `rows` samples, so that a pass is not much wider than a measured one."""
        widths, seen = self.pass_costs.widths, max(self.pass_costs.widest, int(self.pass_costs.widths[rows]))
        above = min(int(np.searchsorted(widths, seen, side="right")), len(widths) - 1)
        widest = int(np.searchsorted(widths, max(GROWTH * seen, float(widths[above])), side="right")) - 1
        return max(0, min(rows * self.longest, widest - rows))

    def _drafting(self, asked: tuple[int, ...], requests: int) -> float:
        return self.overhead + self._drafters_seconds(asked, requests)

    def _drafters_seconds(self, asked: tuple[int, ...], requests: int) -> float:
        return sum(self.draft_costs.seconds(drafter, requests, self.longest) for drafter in asked)

    def _probe(self, rows: int, seconds: Floats, drafts: bool, rate: float) -> Plan | None:
        """Return a probe of the alternative if one is due and affordable; `rate` is that of the choice."""
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
        # The expected loss is uncertain, otherwise no probe would be needed; the actual loss is charged to the credit.
        while slots and not self.probing and DOUBT * float(took[slots] - tokens[slots] / rate) > self.credit:
            slots //= 2
        return Plan(everybody, requests, slots, "Probe", rate) if slots else None

    def _supplied(self, supply: Floats, seen: Floats, index: int, offers: tuple[Offered, ...], winner: Ints) -> None:
        """Add the winners' offers to `supply` and `seen` of a set of drafters."""
        count = len(winner)
        if not count:
            return
        drafters, matches, lengths = _won(offers, winner)
        slots = tokens_of(drafters * supply.shape[2] + matches, lengths, supply.shape[1:])
        seen[index] = min(seen[index], SUPPLY_WINDOW)
        supply[index] = (supply[index] * seen[index] + slots) / (seen[index] + count)
        seen[index] += count


def _overhead(earlier: float, beside: float, pass_seconds: float) -> float:
    """Return the updated seconds of choosing after one more step; `earlier` 0 means no observation."""
    if not earlier:
        return min(beside, FIRST_OVERHEAD * pass_seconds)
    share = OVERHEAD_FALLS if beside < earlier else OVERHEAD_SHARE
    return earlier + share * (min(beside, 4 * earlier) - earlier)


def _won(offers: tuple[Offered, ...], winner: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (drafters, matches, lengths), [n] each, of the offer that won each request."""
    if len(offers) == 1:
        return np.full(len(winner), offers[0].drafter), offers[0].matches, offers[0].lengths
    place = np.arange(len(winner))
    matches, lengths = (np.stack(each)[winner, place] for each in zip(*(offer[1:] for offer in offers), strict=True))
    return np.array([offer.drafter for offer in offers])[winner], matches, lengths


def _expected(survival: Floats, offer: Offered) -> Floats:
    """Return the expected accepted tokens of each draft [n] of a drafter, from its survival [matches, positions]."""
    sums = np.concatenate([np.zeros((len(survival), 1)), survival.cumsum(axis=1)], axis=1)
    expected: Floats = sums[offer.matches, np.minimum(offer.lengths, survival.shape[1])]
    return expected
