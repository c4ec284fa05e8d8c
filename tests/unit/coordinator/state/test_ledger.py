"""The ledger, message by message: groups, migrations, restarts, the order of the queue, and spans of versions."""

from dataclasses import replace

import pytest
from tests.support.coordinator.numbered_tokens import tokens_at

from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_REWARD, Scope
from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import Lease, VersionSpan
from rlhf_coordinator.state.ledger import Ledger, interleave_prompt_groups
from rlhf_coordinator.state.sample import first_tokens, join_spans

TASKS = (SCORE_REFERENCE, SCORE_REWARD)
WHOLE = replace(SCORE_REWARD, scope=Scope.GROUP)


def finished_group(ledger: Ledger, size: int) -> None:
    for index in range(size):
        ledger.finish(index, ledger.assign(index, "a"), "a", tokens_at(index, 0, 2), "stop", "")


def test_a_group_task_opens_with_the_last_response_and_is_counted_with_the_last_result() -> None:
    ledger = Ledger(0, 2, (WHOLE,), 1, group_size=2)
    ledger.finish(0, ledger.assign(0, "a"), "a", tokens_at(0, 0, 2), "stop", "")
    assert not ledger.open_groups()
    ledger.finish(1, ledger.assign(1, "a"), "a", tokens_at(1, 0, 2), "stop", "")
    assert list(ledger.open_groups()) == [(0, WHOLE.name)]
    attempts = ledger.assign_group(0, WHOLE.name, "b")
    assert ledger.scoring_on("b") == 2
    assert ledger.score_in_group(0, attempts[0], "b", WHOLE.name, b"0000") == (True, {})
    assert ledger.counts()["scored"] == 0
    assert ledger.score_in_group(1, attempts[1], "b", WHOLE.name, None) == (True, {0: b"0000", 1: None})
    assert ledger.all_scored
    assert [sample.abstained for sample in ledger.samples] == [False, True]


def test_what_a_lost_worker_said_of_a_part_of_a_group_is_forgotten() -> None:
    ledger = Ledger(0, 2, (WHOLE,), 1, group_size=2)
    finished_group(ledger, 2)
    attempts = ledger.assign_group(0, WHOLE.name, "b")
    ledger.score_in_group(0, attempts[0], "b", WHOLE.name, b"0000")
    assert ledger.reclaim("b").tasks == ((0, WHOLE.name), (1, WHOLE.name))
    assert ledger.score_in_group(1, attempts[1], "b", WHOLE.name, b"1111") == (False, {}), "late, of a lost worker"
    again = ledger.assign_group(0, WHOLE.name, "c")
    assert all(again[index] > attempts[index] for index in (0, 1))
    ledger.score_in_group(1, again[1], "c", WHOLE.name, b"3333")
    assert ledger.score_in_group(0, again[0], "c", WHOLE.name, b"2222")[1] == {0: b"2222", 1: b"3333"}


def test_a_group_goes_on_without_a_sample_that_failed() -> None:
    ledger = Ledger(0, 2, (WHOLE,), 1, group_size=2)
    ledger.finish(0, ledger.assign(0, "a"), "a", tokens_at(0, 0, 2), "stop", "")
    ledger.give_up(1)
    attempts = ledger.assign_group(0, WHOLE.name, "b")
    assert list(attempts) == [0]
    assert ledger.score_in_group(0, attempts[0], "b", WHOLE.name, b"0000")[1] == {0: b"0000"}
    assert ledger.all_scored


def test_a_batch_is_trained_once() -> None:
    ledger = Ledger(0, 1, (), 1)
    ledger.finish(0, ledger.assign(0, "a"), "a", tokens_at(0, 0, 2), "stop", "")
    ledger.train()
    assert ledger.counts()["trained"] == 1
    with pytest.raises(ValueError, match="cannot be trained"):
        ledger.train()


def migrating(ledger: Ledger) -> tuple[Lease, Lease]:
    """Sample 0 is moving from a to b; three tokens are known."""
    attempt = ledger.assign(0, "a")
    ledger.progress(0, attempt, "a", 0, tokens_at(0, 0, 3))
    return ledger.migrate(0, "b")


def test_a_migrating_sample_is_its_sources_until_the_destination_has_it() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    assert ledger.progress(0, source.attempt, "a", 3, tokens_at(0, 3, 4)) == 1, (
        "it is decoded on while its cache travels"
    )
    assert (ledger.decoding_on("a"), ledger.decoding_on("b"), ledger.arriving_on("b")) == (1, 0, 1)
    assert ledger.progress(0, arriving.attempt, "b", 4, tokens_at(0, 4, 4)) == 0
    assert (ledger.decoding_on("a"), ledger.decoding_on("b"), ledger.arriving_on("b")) == (0, 1, 0)
    assert ledger.progress(0, source.attempt, "a", 0, tokens_at(0, 0, 4)) == 0, "the source has it no more"
    assert ledger.moved(0, source, arriving, tokens_at(0, 0, 4)), "and says so, later"
    assert (ledger.migrated, ledger.returned, ledger.counts()["decoding"]) == (1, 0, 1)


def test_a_sample_that_could_not_be_moved_goes_on_and_what_the_destination_says_is_stale() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    assert ledger.stayed(0, source)
    assert ledger.samples[0].immovable
    assert not ledger.finish(0, arriving.attempt, "b", tokens_at(0, 0, 4), "stop", "")
    assert ledger.finish(0, source.attempt, "a", tokens_at(0, 0, 4), "stop", "")
    assert not ledger.stayed(0, source)


def test_a_sample_survives_the_loss_of_either_side_of_its_migration() -> None:
    ledger = Ledger(0, 1, TASKS, 1)
    source, arriving = migrating(ledger)
    ledger.reclaim("b")
    assert ledger.counts()["migrating"] == 1, "the source has it until it says otherwise"
    assert ledger.moved(0, source, arriving, tokens_at(0, 0, 4))
    assert (ledger.queued(1), len(ledger.samples[0].response)) == ([0], 4)
    source, arriving = migrating(ledger)
    assert ledger.reclaim("a").queued == (0,)
    assert not ledger.finish(0, arriving.attempt, "b", tokens_at(0, 0, 4), "stop", ""), "given back means given back"
    assert not ledger.moved(0, source, arriving, tokens_at(0, 0, 4))
    assert ledger.queued(1) == [0]


def test_samples_with_most_tokens_are_handed_out_first() -> None:
    ledger = Ledger(0, 3, TASKS, 1)
    attempt = ledger.assign(2, "a")
    ledger.progress(2, attempt, "a", 0, tokens_at(2, 0, 3))
    ledger.reclaim("a")
    assert ledger.queued(9) == [2, 0, 1]


def test_tokens_a_worker_kept_survive_a_coordinator_restart() -> None:
    old = Ledger(0, 2, TASKS, 1)
    attempt = old.assign(1, "a")
    new = Ledger(0, 2, TASKS, 2)
    new.reclaim("a", {1: (attempt, tokens_at(1, 0, 4))})
    assert new.samples[1].response == tokens_at(1, 0, 4)
    # But not once this coordinator has handed the sample out itself.
    new.reclaim("b", {0: (new.assign(0, "b"), tokens_at(0, 0, 1))})
    new.reclaim("a", {0: (old.samples[0].attempt + 1, tokens_at(0, 0, 4))})
    assert new.samples[0].response == tokens_at(0, 0, 1)


def test_spans_of_versions_are_cut_and_joined() -> None:
    spans = VersionSpan(1, 3), VersionSpan(2, 4)
    first = first_tokens(spans, 5)
    assert first == (VersionSpan(1, 3), VersionSpan(2, 2))
    more = VersionSpan(2, 1), VersionSpan(3, 1)
    assert join_spans(first, more) == (VersionSpan(1, 3), VersionSpan(2, 3), VersionSpan(3, 1))


def test_siblings_take_turns_with_other_prompts_and_known_tokens_come_first() -> None:
    ledger = Ledger(0, 6, TASKS, 1, siblings=3)
    assert ledger.queued(6) == [0, 3, 1, 4, 2, 5]
    assert Ledger(0, 6, TASKS, 1).queued(6) == [0, 1, 2, 3, 4, 5]
    attempt = ledger.assign(4, "a")
    assert ledger.queued(6) == [0, 3, 1, 2, 5]
    ledger.progress(4, attempt, "a", 0, tokens_at(4, 0, 2))
    ledger.reclaim("a")
    assert ledger.queued(6) == [4, 0, 3, 1, 2, 5]


@pytest.mark.parametrize(
    ("speculation", "apart"), [({}, 8), ({"mode": "Disabled"}, 1), ({"drafters": ["Ngram"]}, 1), ({"mode": "Fixed"}, 8)]
)
def test_siblings_are_apart_where_they_draft_for_each_other(speculation: dict[str, object], apart: int) -> None:
    spec = RLHFJobSpec.model_validate(
        {
            "algorithm": {"grpo": {"groupSize": 8}},
            "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
            "prompts": {"path": "prompts.jsonl"},
            "generation": {"speculation": speculation},
        }
    )
    assert interleave_prompt_groups(spec) == apart
