"""Where drafts do not pay, a speculator costs almost nothing: it pauses, and resumes when they may pay again."""

from collections.abc import Sequence

import numpy as np

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import Draft, DraftRequest
from rlhf_workers.generation.speculation.speculator import LONGEST_REST, Mode, Speculator, Verified

LONGEST = 4


class CountingDrafter:
    """Always has a draft; the test's world decides how much of it is right."""

    name = "Ngram"

    def __init__(self) -> None:
        self.asked = 0

    def begin(self, request: SampleRequest) -> None:
        pass

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        pass

    def end(self, key: SampleKey) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += 1
        return [Draft(np.zeros(request.longest, np.int32), 0) for request in requests]


class PricedSteps:
    """Steps with a fixed price per row, in which a fixed number of tokens of every draft are right."""

    def __init__(self, row_seconds: float, mode: Mode = "Auto") -> None:
        self.right = 0
        self.row_seconds = row_seconds
        self.drafter = CountingDrafter()
        self.now = 0.0
        widths = np.arange(64 * (LONGEST + 1) + 1)
        self.speculator = Speculator([self.drafter], mode=mode, longest=LONGEST, widths=widths, clock=lambda: self.now)

    def step(self, samples: int, drafting: float = 1e-5) -> bool:
        """Decode one step with this drafting time; return whether it verified drafts."""
        keys = [SampleKey(0, index, 0) for index in range(samples)]
        requests = [DraftRequest(key, np.zeros(8, np.int32), 4, LONGEST) for key in keys]
        drafts: Sequence[TokenArray] = ()
        if self.speculator.wants(samples, samples * 8):
            drafts = self.speculator.propose(requests, samples * 8)
        outcomes = [
            Verified(key, len(draft), min(self.right, len(draft)))
            for key, draft in zip(keys, drafts, strict=False)
            if len(draft)
        ]
        rows = samples + sum(outcome.drafted for outcome in outcomes)
        self.speculator.verified(outcomes, rows, samples * 8, drafting, 1e-3 + self.row_seconds * rows)
        return bool(outcomes)


def test_where_drafts_never_pay_few_steps_draft_and_most_are_not_even_asked_about() -> None:
    world = PricedSteps(row_seconds=1e-3)
    drafted = sum(world.step(32) for _ in range(2000))
    assert drafted < 0.03 * 2000
    assert world.drafter.asked < 0.03 * 2000
    assert world.speculator.totals.steps == 2000


def test_fixed_drafts_in_every_step_and_says_why_even_where_drafts_never_pay() -> None:
    world = PricedSteps(row_seconds=1e-3, mode="Fixed")
    assert all(world.step(8) for _ in range(100))
    totals = world.speculator.totals
    assert {reason: steps for reason, steps in totals.by_reason.items() if steps} == {"Fixed": 100}
    assert totals.drafted.sum() == 100 * 8 * LONGEST, "every drafted token is verified"


def test_a_rest_ends_when_the_batch_shrinks_to_where_drafts_pay() -> None:
    world = PricedSteps(row_seconds=5e-5)
    world.right = 2
    for _ in range(600):
        world.step(64)
    assert sum(world.step(1) for _ in range(40)) >= 20


def test_drafts_that_become_right_are_found_by_probes() -> None:
    world = PricedSteps(row_seconds=1e-5)
    for _ in range(1000):
        world.step(4)
    world.right = LONGEST
    for _ in range(20 * LONGEST_REST):
        world.step(4)
    assert sum(world.step(4) for _ in range(100)) >= 90


def test_new_weights_end_a_rest() -> None:
    world = PricedSteps(row_seconds=1e-3)
    for _ in range(1500):
        world.step(32)
    learned = world.speculator.controller.pass_costs
    world.speculator.policy_changed()
    world.step(32)
    assert world.speculator.controller.pass_costs is not learned


def test_where_steps_are_short_rests_are_longer_and_still_end() -> None:
    world = PricedSteps(row_seconds=1e-4)
    world.right = 0
    for _ in range(4000):
        world.step(4)
    asked = world.drafter.asked
    for _ in range(4000):
        world.step(4)
    assert 0 < world.drafter.asked - asked <= 4000 / (2 * LONGEST_REST), "a probe follows a rest at most"


def test_a_step_in_which_the_machine_did_something_else_ends_no_drafts() -> None:
    """The first one that asks drafters is delayed by a tenth of a second."""
    world = PricedSteps(row_seconds=1e-5)
    world.right = LONGEST
    asked_before, drafted = 0, 0
    for _ in range(200):
        first = asked_before == 0 and world.drafter.asked > 0
        asked_before = world.drafter.asked
        drafted += world.step(4, drafting=0.1 if not asked_before or first else 1e-5)
    assert drafted >= 150


def test_what_is_known_for_long_is_learned_from_seldom_and_counted_every_time() -> None:
    world = PricedSteps(row_seconds=1e-5)
    world.right = LONGEST
    for _ in range(200):
        world.step(4)
    speculator, changes = world.speculator, 0
    steps, drafted = speculator.totals.steps, int(speculator.totals.drafted.sum())
    before_that = speculator.evidence.take()
    for _ in range(100):
        before = speculator.controller.acceptance
        world.step(4)
        changes += speculator.controller.acceptance is not before
    assert 0 < changes <= 50
    assert speculator.totals.steps - steps == 100
    now = speculator.evidence.take()
    assert before_that is not None
    assert now is not None
    assert now.steps == 100
    assert sum(count.drafted for count in now.learned.counts) == int(speculator.totals.drafted.sum()) - drafted
    world.right = 0
    assert sum(world.step(4) for _ in range(400)) < 300, "and that drafts are wrong is noticed"
