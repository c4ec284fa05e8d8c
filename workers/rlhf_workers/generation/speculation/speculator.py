"""What an engine drives to decode several tokens a step: drafters are fed and asked, the controller says how far.

Rule: for every step an engine asks `wants`; where it says no, the step is a plain one and drafters are not even asked.
Otherwise `propose` has a draft (empty for many) for each request. After the step, also a plain one, `verified` tells
what became of it, from which everything is learned. Of a small model a step takes not much longer than that. So where
drafts were found to be faster for a while, one step of LEARN_STEPS is learned from; and where they are slower it rests:
for a growing number of steps nothing is asked or learned, until the batch shrinks or the policy changes. Totals count
every step. Tokens reach drafters in few calls: they are kept until drafts are asked for, or for FEED_STEPS steps.
Nothing here can change a token. Not thread-safe; totals are read by scrapes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_planner.speculation.controller import Choice, DraftController, MeasuredStep, Offered, Outcomes, Plan
from rlhf_planner.speculation.learned_drafts import LearnedDrafts
from rlhf_workers.generation.speculation.draft_comparison import DraftComparison
from rlhf_workers.generation.speculation.drafter import (
    MATCHES,
    Draft,
    Drafter,
    DraftRequest,
    LearnsSiblings,
    PromptGroup,
    SampleSource,
    TakesWeights,
)
from rlhf_workers.generation.speculation.evidence import Evidence
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals

Ints = npt.NDArray[np.int64]
Mode = Literal["Auto", "Fixed"]

FEED_STEPS: Final = 32
"""Steps after which drafters are told of tokens at the latest."""
PLAN_STEPS: Final = 16
"""Steps for which a plan holds while the batch is about the same: making one takes a fifth of a millisecond."""
ABOUT: Final = 8
"""A batch is about the same while it differs by less than this part of itself."""
FIRST_REST: Final = 16
"""Steps of the first rest: about what it takes to see a second time that drafts are slower."""
LONGEST_REST: Final = 128
"""Steps: beyond, drafts that have become right would be found later."""
LONGEST_SHORT_REST: Final = 1024
"""Steps where they take so little that LONGEST_REST of them take less than REST_SECONDS: what is spent between rests,
a millisecond, is then a small part of a hundredth, too."""
REST_SECONDS: Final = 0.5
SETTLED: Final = 64
"""Steps with drafts in a row after which costs and acceptance are known."""
LEARN_STEPS: Final = 4
"""Of as many such steps one is learned from."""
SHRUNK: Final = 0.75
"""Part of the batch below which a rest ends: drafts pay where few samples run."""
NOTHING: Final[TokenArray] = np.empty(0, np.int32)
NO_PLAN: Final = Plan((), 0, 0, "Unmeasured", 0.0)


class Rest(NamedTuple):
    """Steps that are plain without a question."""

    left: int
    steps: int
    """Of the whole rest."""
    rows: int
    """Samples when it began."""


class Verified(NamedTuple):
    """What became of one draft that an engine verified."""

    key: SampleKey
    drafted: int
    """Tokens of it that were judged or could have been: without those behind the end of the response."""
    accepted: int
    """How many of them, from the first on, the policy drew too."""


@runtime_checkable
class Speculates(Protocol):
    """An engine that can verify drafts."""

    @property
    def speculator(self) -> "Speculator | None":
        """Return what drafts for it; None: it decodes token by token."""


class Speculator:
    """Of one engine."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        mode: Mode,
        longest: int,
        widths: Ints,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """At most `longest` tokens a draft; `widths` int64 [rows + 1] is how wide a pass over so many rows is, for as
        many rows as a pass may have. `clock` returns seconds."""
        self.mode: Mode = mode
        self.longest = longest
        self.controller = DraftController.new(len(drafters), MATCHES, longest, widths)
        self.totals = SpeculationTotals.for_drafters([drafter.name for drafter in drafters], longest)
        self.evidence = Evidence([drafter.name for drafter in drafters], MATCHES, longest)
        """What the coordinator is told."""
        self._drafters = list(drafters)
        self._clock = clock
        self._everybody = tuple(range(len(drafters)))
        self._plan = NO_PLAN
        self._planned = (0, 0)
        """(samples, steps it holds for) of the plan."""
        self._rows = 0
        self._rest = Rest(0, 0, 0)
        self._rest_length = FIRST_REST
        """Steps of the next rest."""
        self._faster = 0
        """Steps in a row in which drafts were expected to be faster, probes of others among them."""
        self._unlearned, self._unlearned_seconds = 0, 0.0
        """Steps of which nothing was learned since the last one that was, and what they took."""
        self._judged: list[Outcomes] = []
        """What became of drafts in these steps, which is learned with the next: acceptance may fall at any time."""
        self._drawn: dict[SampleKey, list[TokenArray]] = {}
        """Tokens that drafters were not told of yet."""
        self._fed = 0
        """Steps since they were told."""
        self._proposed: dict[SampleKey, tuple[int, int]] = {}
        """(drafter, match) of the drafts of this step."""
        self._rivals = DraftComparison()

    # ------------------------------------------------------------ samples

    def begin(self, request: SampleRequest) -> None:
        """A sample is decoded here from now on."""
        for drafter in self._drafters:
            drafter.begin(request)

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """The policy drew tokens, int32 [n], for a sample that began here."""
        self._drawn.setdefault(key, []).append(tokens)

    def end(self, key: SampleKey) -> None:
        """A sample finished, or was withdrawn or moved away."""
        self._feed((key,))
        self._proposed.pop(key, None)
        self._rivals.forget(key)
        for drafter in self._drafters:
            drafter.end(key)

    # ------------------------------------------------------------ a step

    def wants(self, rows: int, keys: int) -> bool:
        """Return whether drafts are wanted for a step over `rows` samples that read `keys` keys in all."""
        self._proposed.clear()
        self._rows = rows
        if self._rest.left:
            if rows > SHRUNK * self._rest.rows:
                return False
            self._end_rest()
        if self.mode == "Fixed":
            self._plan = Plan(self._everybody, rows, rows * self.longest, "Faster", 0.0)
        else:
            self._plan = self._plan_for(rows, keys)
        self._faster = self._faster + 1 if self._plan.reason in ("Faster", "Probe") else 0
        return bool(self._plan.drafters)

    @property
    def _learns(self) -> bool:
        """Whether this step is learned from."""
        return self._plan.probes or self._faster <= SETTLED or self._faster % LEARN_STEPS == 0

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """Return what to verify for each request, int32 [0 .. longest]; `keys` as in `wants`.

        Requests may be fewer than the samples of the step: those that can use a draft.
        """
        plan = self._plan
        result = [NOTHING] * len(requests)
        # A probe asks for few samples, and not for the same ones every time.
        first = self.totals.steps % max(1, len(requests)) if plan.requests < len(requests) else 0
        asked = [(first + at) % len(requests) for at in range(min(plan.requests, len(requests)))]
        if not asked or not plan.drafters:
            return result
        self._feed()
        chosen = [requests[at] for at in asked]
        if (duels := self._rivals.compared(chosen)) is not None:
            self.controller = self.controller.compared(duels)
        wanted = [request._replace(longest=min(request.longest, self.longest)) for request in chosen]
        drafts, offers, seconds = [], [], []
        for drafter in plan.drafters:
            started = self._clock()
            made = self._drafters[drafter].draft(wanted)
            seconds.append(max(self._clock() - started, 0.0))
            drafts.append(made)
            offers.append(_offer(drafter, made, wanted))
        choice = self._choice(plan, keys, tuple(offers))
        if self._learns:
            self.controller = self.controller.offered(tuple(offers), choice, tuple(seconds))
            self._rivals.note(plan.drafters, drafts, wanted)
        self.totals.asked(plan.drafters, seconds)
        for at in np.flatnonzero(choice.lengths):
            offer = int(choice.drafters[at])
            draft = drafts[offer][at]
            result[asked[at]] = draft.tokens[: int(choice.lengths[at])]
            self._proposed[wanted[at].key] = (plan.drafters[offer], draft.match)
        return result

    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None:
        """Learn from a step: `pass_rows` rows were decoded, drafted ones among them.

        `keys` as in `wants`; `draft_seconds` went into `wants` and `propose`, `pass_seconds` into the passes, without
        prefill. Steps that are unlike others, as those that capture a graph, are left out by the caller.
        """
        self._fed += 1
        if self._fed >= FEED_STEPS:
            self._feed()
        if self._rest.left:
            seconds = draft_seconds + pass_seconds
            self.totals.rested(self._rows)
            self.evidence.rested(self._rows, seconds)
            self._unlearned += 1
            self._unlearned_seconds += seconds
            self._rest = self._rest._replace(left=self._rest.left - 1)
            if not self._rest.left:
                self._end_rest()
            return
        known = [(each, *self._proposed[each.key]) for each in outcomes if each.key in self._proposed]
        columns = np.array(
            [(drafter, match, each.drafted, each.accepted) for each, drafter, match in known], np.int64
        ).reshape(-1, 4)
        learned = Outcomes(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
        rows = self._rows or pass_rows
        slots = max(0, pass_rows - rows)
        accepted = int(learned.accepted.sum())
        step = MeasuredStep(rows, keys, slots, rows + accepted, draft_seconds, pass_seconds)
        self.totals.stepped(self.mode, self._plan, step, learned)
        for each, _, _ in known:
            self.evidence.verified(each.key, each.drafted, each.accepted)
        self._proposed.clear()
        seconds = draft_seconds + pass_seconds
        self._judged.append(learned)
        if not self._learns:
            self.evidence.stepped(self._plan, step, learned, 0.0)
            self._unlearned += 1
            self._unlearned_seconds += seconds
            return
        # It speaks for those before it, too.
        regret = (1 + self._unlearned) * self.controller.records.regret(rows, step.tokens, seconds)
        self.evidence.stepped(self._plan, step, learned, regret)
        self._count_unlearned(asked=True)
        self.controller = self.controller.observe(self._plan, step, _joined(self._judged))
        self._judged = []
        self._begin_rest()

    # ------------------------------------------------------------ what comes from elsewhere

    @property
    def takes_weights(self) -> bool:
        """Return whether a drafter has weights of its own."""
        return any(isinstance(drafter, TakesWeights) for drafter in self._drafters)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The draft model has new weights, which came with the policy's; return bytes. See `TakesWeights`."""
        return sum(drafter.load_weights(tensors) for drafter in self._drafters if isinstance(drafter, TakesWeights))

    @property
    def learns_siblings(self) -> bool:
        """Whether a drafter drafts by what others decode."""
        return any(isinstance(drafter, LearnsSiblings) for drafter in self._drafters)

    def begin_with(self, learned: LearnedDrafts) -> None:
        """Start from what other workers of the job learned."""
        names = [drafter.name for drafter in self._drafters]
        self.controller = learned.given_to(self.controller, names)

    def policy_changed(self) -> None:
        """The policy has new weights: what was learned of it counts less."""
        self.controller = self.controller.aged()
        self._end_rest()
        self._rest_length = FIRST_REST
        self._faster = 0
        for drafter in self._drafters:
            if isinstance(drafter, LearnsSiblings):
                drafter.age()

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Tokens of a sibling that is decoded elsewhere, or of an earlier epoch; see `LearnsSiblings`."""
        for drafter in self._drafters:
            if isinstance(drafter, LearnsSiblings):
                drafter.learn(group, source, offset, tokens, weight)

    def forget(self, group: PromptGroup) -> None:
        """All samples of a prompt are finished; see `LearnsSiblings`."""
        for drafter in self._drafters:
            if isinstance(drafter, LearnsSiblings):
                drafter.forget(group)

    # ------------------------------------------------------------ parts

    def _begin_rest(self) -> None:
        """After a step: rest where drafts are slower."""
        if self.mode == "Fixed" or self._plan.probes or self._plan.reason == "Unmeasured":
            return
        if self._plan.reason == "Faster":
            self._rest_length = FIRST_REST
            return
        self._rest = Rest(self._rest_length, self._rest_length, self._rows)

    def _end_rest(self) -> None:
        """Go on with a new plan."""
        if self._rest.steps and not self._rest.left:
            short = self._unlearned_seconds * LONGEST_REST < REST_SECONDS * self._rest.steps
            self._rest_length = min(2 * self._rest.steps, LONGEST_SHORT_REST if short else LONGEST_REST)
        self._count_unlearned(asked=not self._rest.steps)
        self._rest = Rest(0, 0, 0)
        self._planned = (0, 0)

    def _count_unlearned(self, *, asked: bool) -> None:
        """Tell the controller of steps of which nothing was learned; `asked`: drafters were."""
        if self._unlearned:
            self.controller = self.controller.unlearned(self._unlearned, self._unlearned_seconds, asked=asked)
            self._unlearned, self._unlearned_seconds = 0, 0.0

    def _plan_for(self, rows: int, keys: int) -> Plan:
        samples, steps = self._planned
        if steps > 0 and ABOUT * abs(rows - samples) <= samples and not self._plan.probes:
            self._planned = (samples, steps - 1)
            if rows == samples:
                return self._plan
            requests = rows if self._plan.drafters else 0
            return self._plan._replace(requests=requests, rate=self._plan.rate * rows / samples)
        plan = self.controller.plan(rows, keys)
        self._planned = (rows, PLAN_STEPS if plan.rate else 0)
        return plan

    def _choice(self, plan: Plan, keys: int, offers: tuple[Offered, ...]) -> Choice:
        if self.mode == "Auto":
            return self.controller.choose(plan, self._rows, keys, offers)
        return self.controller.choose(plan._replace(reason="Probe"), self._rows, keys, offers)

    def _feed(self, keys: Sequence[SampleKey] | None = None) -> None:
        """Tell drafters of tokens that were drawn, of these samples or of all."""
        if keys is None:
            drawn, self._drawn, self._fed = self._drawn, {}, 0
        else:
            drawn = {key: self._drawn.pop(key) for key in keys if key in self._drawn}
        for key, parts in drawn.items():
            tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
            for drafter in self._drafters:
                drafter.extend(key, tokens)


def _joined(outcomes: Sequence[Outcomes]) -> Outcomes:
    """Those of one step and more, one after the other."""
    return outcomes[0] if len(outcomes) == 1 else Outcomes(*map(np.concatenate, zip(*outcomes, strict=True)))


def _offer(drafter: int, drafts: Sequence[Draft], requests: Sequence[DraftRequest]) -> Offered:
    """What a drafter has, checked: it may be anybody's."""
    if len(drafts) != len(requests):
        raise ValueError(f"a drafter made {len(drafts)} drafts for {len(requests)} requests")
    lengths = [min(len(draft.tokens), request.longest) for draft, request in zip(drafts, requests, strict=True)]
    matches = np.array([draft.match for draft in drafts], np.int64).clip(0, MATCHES - 1)
    return Offered(drafter, matches, np.array(lengths, np.int64))
