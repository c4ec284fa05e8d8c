"""Lets an engine decode several tokens per step: feeds and asks drafters, and limits drafts with the controller.

Rule: an engine calls `wants` before a step that may draft; if it returns False, the step is plain. Where drafts are
slower, mode Auto rests.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_planner.speculation.controller import DraftController, MeasuredStep, Offered, Outcomes, Plan
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
"""Maximum reported steps before drafters get new tokens."""
PLAN_STEPS: Final = 16
"""Maximum further steps for which a plan is valid, while the batch size is similar."""
ABOUT: Final = 8
"""Inverse of the relative difference up to which batch sizes are similar."""
FIRST_REST: Final = 16
"""Steps of the first rest."""
LONGEST_REST: Final = 128
"""Maximum steps of a rest, unless steps are short."""
LONGEST_SHORT_REST: Final = 1024
"""Maximum steps of a rest if LONGEST_REST steps take less than REST_SECONDS."""
REST_SECONDS: Final = 0.5
SETTLED: Final = 64
"""Value of `_faster` above which only some steps are learned from."""
LEARN_STEPS: Final = 4
"""Steps per step that is learned from, once `_faster` is above SETTLED."""
SHRUNK: Final = 0.75
"""Share of a rest's initial samples; the rest ends when the batch has as few or fewer."""
NOTHING: Final[TokenArray] = np.empty(0, np.int32)
NO_PLAN: Final = Plan((), 0, 0, "Unmeasured", 0.0)


class Rest(NamedTuple):
    """Plain steps before drafters are asked again."""

    left: int
    steps: int
    """Length of the whole rest."""
    rows: int
    """Samples when the rest began."""


class Verified(NamedTuple):
    """Outcome of one verified draft."""

    key: SampleKey
    drafted: int
    """Drafted tokens, without those after the end of the response."""
    accepted: int
    """Leading tokens that the policy drew too."""


@runtime_checkable
class Speculates(Protocol):
    """An engine that can verify drafts."""

    @property
    def speculator(self) -> "Speculator | None":
        """The engine's speculator; None without one."""


class Speculator:
    """Speculator of one engine."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        mode: Mode,
        longest: int,
        widths: Ints,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`longest`: maximum tokens per draft. `clock` returns seconds.

        `widths` int64 [rows + 1]: width of a pass over so many rows.
        """
        self.mode: Mode = mode
        self.longest = longest
        self.controller = DraftController.new(len(drafters), MATCHES, longest, widths)
        self.totals = SpeculationTotals.for_drafters([drafter.name for drafter in drafters], longest)
        self.evidence = Evidence([drafter.name for drafter in drafters], MATCHES, longest)
        """Outcomes that are reported to the coordinator."""
        self._drafters = list(drafters)
        self._clock = clock
        self._everybody = tuple(range(len(drafters)))
        self._plan = NO_PLAN
        self._planned = (0, 0)
        """(samples, remaining steps) of the plan."""
        self._rows = 0
        self._rest = Rest(0, 0, 0)
        self._rest_length = FIRST_REST
        """Steps of the next rest."""
        self._faster = 0
        """Consecutive steps whose plan had the reason Fixed, Faster or Probe."""
        self._unlearned, self._unlearned_seconds = 0, 0.0
        """Steps without learning that were not passed to the controller yet, and their seconds."""
        self._judged: list[Outcomes] = []
        """Outcomes of drafts that the controller has not got yet."""
        self._drawn: dict[SampleKey, list[TokenArray]] = {}
        """Tokens not yet passed to drafters."""
        self._fed = 0
        """Reported steps since all drawn tokens were passed to drafters."""
        self._proposed: dict[SampleKey, tuple[int, int]] = {}
        """(drafter, match) of this step's drafts."""
        self._rivals = DraftComparison()

    # ------------------------------------------------------------ samples

    def begin(self, request: SampleRequest) -> None:
        """Register a sample that is decoded here from now on."""
        for drafter in self._drafters:
            drafter.begin(request)

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Add tokens, int32 [n], that the policy drew for a registered sample."""
        self._drawn.setdefault(key, []).append(tokens)

    def end(self, key: SampleKey) -> None:
        """Remove a sample that finished, was withdrawn or moved away."""
        self._feed((key,))
        self._proposed.pop(key, None)
        self._rivals.forget(key)
        for drafter in self._drafters:
            drafter.end(key)

    # ------------------------------------------------------------ a step

    def wants(self, rows: int, keys: int) -> bool:
        """Return whether to ask drafters in a step over `rows` samples that reads `keys` keys in total."""
        self._proposed.clear()
        self._rows = rows
        if self._rest.left:
            if rows > SHRUNK * self._rest.rows:
                return False
            self._end_rest()
        if self.mode == "Fixed":
            self._plan = Plan(self._everybody, rows, rows * self.longest, "Fixed", 0.0)
        else:
            self._plan = self._plan_for(rows, keys)
        self._faster = self._faster + 1 if self._plan.reason in ("Fixed", "Faster", "Probe") else 0
        return bool(self._plan.drafters)

    @property
    def _learns(self) -> bool:
        """Whether this step is learned from."""
        return self._plan.probes or self._faster <= SETTLED or self._faster % LEARN_STEPS == 0

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """Return the draft to verify for each request, int32 [0 .. longest]; `keys` as in `wants`.

        Samples that can use no draft need no request.
        """
        plan = self._plan
        result = [NOTHING] * len(requests)
        # A probe asks for few samples, from a place that moves with the steps.
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
            proposals = self._drafters[drafter].draft(wanted)
            seconds.append(max(self._clock() - started, 0.0))
            drafts.append(proposals)
            offers.append(_offer(drafter, proposals, wanted))
        choice = self.controller.choose(plan, self._rows, keys, tuple(offers))
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
        """Count a step that decoded `pass_rows` rows, including drafted ones, and learn from it if that is due.

        `keys` as in `wants`; `draft_seconds`: time of `wants` and `propose`; `pass_seconds`: time of the passes without
        prefill. The caller omits exceptional steps.
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
        proposed = [(each, *self._proposed[each.key]) for each in outcomes if each.key in self._proposed]
        columns = np.array(
            [(drafter, match, each.drafted, each.accepted) for each, drafter, match in proposed], np.int64
        ).reshape(-1, 4)
        learned = Outcomes(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
        rows = self._rows or pass_rows
        slots = max(0, pass_rows - rows)
        accepted = int(learned.accepted.sum())
        step = MeasuredStep(rows, keys, slots, rows + accepted, draft_seconds, pass_seconds)
        self.totals.stepped(self._plan, step, learned)
        for each, _, _ in proposed:
            self.evidence.verified(each.key, each.drafted, each.accepted)
        self._proposed.clear()
        seconds = draft_seconds + pass_seconds
        self._judged.append(learned)
        if not self._learns:
            self.evidence.stepped(self._plan, step, learned, 0.0)
            self._unlearned += 1
            self._unlearned_seconds += seconds
            return
        # The step represents those before it, too.
        regret = (1 + self._unlearned) * self.controller.records.regret(rows, step.tokens, seconds)
        self.evidence.stepped(self._plan, step, learned, regret)
        self._count_unlearned(asked=True)
        self.controller = self.controller.observe(self._plan, step, _joined(self._judged))
        self._judged = []
        self._begin_rest()

    # ------------------------------------------------------------ input from the job

    @property
    def takes_weights(self) -> bool:
        """Whether a drafter has its own weights."""
        return any(isinstance(drafter, TakesWeights) for drafter in self._drafters)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Load new weights into the drafters that take them; return bytes. See `TakesWeights`."""
        return sum(drafter.load_weights(tensors) for drafter in self._drafters if isinstance(drafter, TakesWeights))

    @property
    def learns_siblings(self) -> bool:
        """Whether a drafter uses tokens of siblings on other workers."""
        return any(isinstance(drafter, LearnsSiblings) for drafter in self._drafters)

    def begin_with(self, learned: LearnedDrafts) -> None:
        """Start from the statistics of the job's drafts."""
        names = [drafter.name for drafter in self._drafters]
        self.controller = learned.given_to(self.controller, names)

    def policy_changed(self) -> None:
        """Reduce the weight of what was learned, and end a rest: the policy has new weights."""
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
        """Learn tokens of a sibling on another worker, or of an earlier epoch; see `LearnsSiblings`."""
        for drafter in self._drafters:
            if isinstance(drafter, LearnsSiblings):
                drafter.learn(group, source, offset, tokens, weight)

    def forget(self, group: PromptGroup) -> None:
        """Drop a prompt group; see `LearnsSiblings`."""
        for drafter in self._drafters:
            if isinstance(drafter, LearnsSiblings):
                drafter.forget(group)

    # ------------------------------------------------------------ parts

    def _begin_rest(self) -> None:
        """Start a rest if drafts were expected to be slower; reset its length if they were expected to be faster."""
        if self._plan.reason in ("Fixed", "Probe", "Unmeasured"):
            return
        if self._plan.reason == "Faster":
            self._rest_length = FIRST_REST
            return
        self._rest = Rest(self._rest_length, self._rest_length, self._rows)

    def _end_rest(self) -> None:
        """End the rest, if there is one, report its steps to the controller, and request a new plan."""
        if self._rest.steps and not self._rest.left:
            short = self._unlearned_seconds * LONGEST_REST < REST_SECONDS * self._rest.steps
            self._rest_length = min(2 * self._rest.steps, LONGEST_SHORT_REST if short else LONGEST_REST)
        self._count_unlearned(asked=not self._rest.steps)
        self._rest = Rest(0, 0, 0)
        self._planned = (0, 0)

    def _count_unlearned(self, *, asked: bool) -> None:
        """Report steps without learning to the controller; `asked`: drafters were asked."""
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

    def _feed(self, keys: Sequence[SampleKey] | None = None) -> None:
        """Pass drawn tokens of these samples, or of all, to the drafters."""
        if keys is None:
            drawn, self._drawn, self._fed = self._drawn, {}, 0
        else:
            drawn = {key: self._drawn.pop(key) for key in keys if key in self._drawn}
        for key, parts in drawn.items():
            tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
            for drafter in self._drafters:
                drafter.extend(key, tokens)


def _joined(outcomes: Sequence[Outcomes]) -> Outcomes:
    """Concatenate the outcomes of one or more steps."""
    return outcomes[0] if len(outcomes) == 1 else Outcomes(*map(np.concatenate, zip(*outcomes, strict=True)))


def _offer(drafter: int, drafts: Sequence[Draft], requests: Sequence[DraftRequest]) -> Offered:
    """Return the matches and lengths of a drafter's drafts, cut to their bounds; ValueError for a wrong number of
    drafts."""
    if len(drafts) != len(requests):
        raise ValueError(f"a drafter made {len(drafts)} drafts for {len(requests)} requests")
    lengths = [min(len(draft.tokens), request.longest) for draft, request in zip(drafts, requests, strict=True)]
    matches = np.array([draft.match for draft in drafts], np.int64).clip(0, MATCHES - 1)
    return Offered(drafter, matches, np.array(lengths, np.int64))
