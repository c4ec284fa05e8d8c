"""Growth of an iteration depends only on which groups were dropped, the same after every restart."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_REWARD
from rlhf_api.algorithms.refill import RefillRule, UsedUp, round_ends, teaches_nothing
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.batch import refill_rule
from rlhf_coordinator.storage.journal_pb2 import Begun, Record, Refill

TASKS = (SCORE_REFERENCE, SCORE_REWARD)
SIZE = 2
"""Number of samples per group."""


def by_rounds(first: int, dull: list[bool], rounds: int) -> tuple[int, int]:
    """Return (groups in total, rounds) if each round waits for the previous one: the definition."""
    current, groups = range(first), first
    for number in range(rounds):
        added = sum(dull[group] for group in current)
        if not added:
            return groups, number
        current, groups = range(groups, groups + added), groups + added
    return groups, rounds


class RefilledIteration:
    """An iteration of `first` groups, of which those in `dull` have equal rewards, with its journal."""

    def __init__(self, first: int, dull: list[bool], rule: RefillRule, abstains: bool = False) -> None:
        self.first, self.dull, self.rule, self.abstains = first, dull, rule, abstains
        self.journal: list[tuple[int, str]] = []
        self.starts = 0
        self.restart()

    def restart(self) -> None:
        self.starts += 1
        self.ledger = Ledger(0, self.first * SIZE, TASKS, self.starts, 1, SIZE, self.rule)
        for index, event in self.journal:
            if event == "finished":
                self.ledger.restore_response(index, response(index), "stop", "")
            elif event == "failed":
                self.ledger.give_up(index)
            else:
                self.ledger.restore_score(index, event, self.score(index, event))

    def score(self, index: int, task: str) -> bytes | None:
        group, place = divmod(index, SIZE)
        if task == "reward" and self.dull[group] and self.abstains:
            return None if place else struct.pack("<f", 1.0)
        return struct.pack("<f", 0.0 if self.dull[group] else place)

    def finish(self, index: int) -> None:
        self.ledger.finish(index, self.ledger.assign(index, "a"), "a", response(index), "stop", "")
        self.journal.append((index, "finished"))

    def work(self, rng: random.Random) -> bool:
        """Take one possible action; return False if there is none."""
        queued, unscored = self.ledger.queued(99), list(self.ledger.unscored())
        if not queued and not unscored:
            return False
        if queued and (not unscored or rng.random() < 0.5):
            self.finish(rng.choice(queued))
            return True
        index = rng.choice(unscored)
        task = rng.choice(sorted(self.ledger.samples[index].open_tasks))
        attempt = self.ledger.assign_scores(index, [task], "b")
        assert self.ledger.score(index, attempt, "b", task, self.score(index, task))
        self.journal.append((index, task))
        return True


def response(index: int) -> PackedResponse:
    return PackedResponse(struct.pack("<i", index), struct.pack("<f", index))


@given(
    first=st.integers(1, 4),
    dull=st.lists(st.booleans(), min_size=40, max_size=40),
    rounds=st.integers(1, 5),
    seed=st.integers(0, 999),
    used_up=st.sampled_from(UsedUp),
    abstains=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_in_any_order_and_with_any_deaths_an_iteration_is_what_the_rounds_say(
    first: int, dull: list[bool], rounds: int, seed: int, used_up: UsedUp, abstains: bool
) -> None:
    rng, iteration = random.Random(seed), RefilledIteration(first, dull, RefillRule(rounds, used_up), abstains)
    groups, used = by_rounds(first, dull, rounds)
    grown = first
    while iteration.work(rng):
        ledger = iteration.ledger
        assert grown <= len(ledger.samples) // SIZE <= groups, "nothing is added that is not needed in the end"
        grown = len(ledger.samples) // SIZE
        assert sum(ledger.counts().values()) == len(ledger.samples)
        if rng.random() < 0.1:
            iteration.restart()
            assert len(iteration.ledger.samples) // SIZE == grown, "a replay grows as far"
    ledger, refill = iteration.ledger, iteration.ledger.refill
    assert ledger.all_scored
    assert (len(ledger.samples) // SIZE, refill.rounds) == (groups, used)
    informative = [group for group in range(groups) if not dull[group]]
    fill = [group for group in range(groups) if dull[group]][: first - len(informative)]
    expected = [(group, False) for group in informative] + [(group, used_up != "Train") for group in fill]
    assert refill.missing == len(fill)
    assert [(sample.index // SIZE, masked) for sample, masked in ledger.batch()[::SIZE]] == expected
    assert len(ledger.batch()) == first * SIZE, "training gets a batch of one size"
    ledger.train()
    assert ledger.counts()["trained"] == SIZE * len(informative)


def test_without_rounds_nothing_is_dropped() -> None:
    iteration = RefilledIteration(2, [True] * 2, RefillRule(0))
    while iteration.work(random.Random(1)):
        pass
    assert iteration.ledger.counts()["scored"] == 4
    assert [sample.index for sample, _ in iteration.ledger.batch()] == [0, 1, 2, 3]


def test_what_failed_is_judged_without_and_a_group_of_which_all_failed_stays_masked_out() -> None:
    iteration = RefilledIteration(2, [False] * 4, RefillRule(3))
    ledger = iteration.ledger
    for index in (0, 1, 2):
        ledger.give_up(index)
        iteration.journal.append((index, "failed"))
    assert not ledger.refill.dropped, "there is no reward to be equal"
    iteration.finish(3)
    for task in ("reference", "reward"):
        ledger.score(3, ledger.assign_scores(3, [task], "b"), "b", task, iteration.score(3, task))
    assert ledger.refill.dropped == [1], "one response is worth as much as itself"
    assert len(ledger.samples) == 6
    for index in (4, 5):
        iteration.finish(index)
        for task in ("reference", "reward"):
            ledger.score(index, ledger.assign_scores(index, [task], "b"), "b", task, iteration.score(index, task))
    assert [(sample.index, masked) for sample, masked in ledger.batch()] == [
        (0, True),
        (1, True),
        (4, False),
        (5, False),
    ]


def test_a_round_is_counted_by_the_place_of_a_group() -> None:
    assert round_ends(4, [0, 2], 3) == [4, 6]
    assert round_ends(4, [0, 2, 5], 3) == [4, 6, 7]
    assert round_ends(4, [0, 2, 5, 6], 3) == [4, 6, 7, 8]
    assert round_ends(4, [0, 2, 5, 6, 7], 3) == [4, 6, 7, 8], "no fourth round"
    assert round_ends(4, [], 3) == [4]


@pytest.mark.parametrize(
    ("rewards", "dull"), [([], True), ([1.0], True), ([0.0, -0.0], True), ([1.0, 1.0], True), ([1.0, 1.0000001], False)]
)
def test_equal_means_equal(rewards: list[float], dull: bool) -> None:
    assert teaches_nothing(rewards) is dull


def test_the_rule_in_the_journal_counts_and_not_what_the_manifest_says_by_now() -> None:
    changed = RefillRule(9, UsedUp.FAIL)
    written = Record(begun=Begun(iteration=3, refill=Refill(rounds=2, used_up="Train")))
    assert refill_rule([written, Record()], changed) == RefillRule(2, UsedUp.TRAIN)
    assert refill_rule([Record(begun=Begun(iteration=3))], changed).rounds == 0, "begun by the version before"
    assert refill_rule([], changed) == changed, "nothing of the iteration is written yet"
