"""When an iteration trains its critics apart: the first measurements, the decision of a replay, and damping."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_planner.critic_overlap_choice import (
    MARGIN,
    REMEASURE,
    WINDOW,
    MeasuredOverlap,
    OverlapChoice,
    SeenIteration,
    choose,
    predicted,
)
from rlhf_planner.critic_overlap_facts import document, read_facts

TOKENS = 1000
SEEN = SeenIteration(TOKENS, 0.5, finished=(4.0, 5.0, 6.0), beside=False)


def measured(together: float, policy: float, critics: float, **others: float) -> MeasuredOverlap:
    """Return seconds of an iteration of TOKENS, by part."""
    first = MeasuredOverlap().with_together(TOKENS, together).with_parts(TOKENS, policy, critics)
    return first.with_scoring(others.get("apart", 0.1), 0.0, others.get("late_share", 1.0))


def test_each_way_is_measured_before_anything_is_chosen() -> None:
    nothing = MeasuredOverlap()
    assert choose(nothing, SEEN, apart=False, pending=False) == OverlapChoice(False, "measure")
    once = nothing.with_together(TOKENS, 10.0)
    assert choose(once, SEEN, apart=False, pending=False) == OverlapChoice(True, "probe")
    assert choose(once, SEEN, apart=False, pending=True) == OverlapChoice(False, "measure"), "the probe's critics train"
    both = once.with_parts(TOKENS, 5.0, 5.0)
    assert choose(both, None, apart=False, pending=False) == OverlapChoice(False, "kept")
    assert choose(both, None, apart=True, pending=False) == OverlapChoice(True, "kept")


def test_a_critic_that_hides_behind_decoding_is_trained_apart() -> None:
    choice = choose(measured(4.0, 2.0, 2.0), SEEN, apart=False, pending=False)
    assert (choice.apart, choice.kind) == (True, "faster")
    assert [choice.unchanged, choice.overlapped] == pytest.approx([10.5, 8.5])
    assert choice.reason == (
        "critics are trained beside the next decoding: the last iteration would take 8.5 s with the overlap and "
        "10.5 s without"
    )


def test_a_fused_table_and_critics_that_outlast_decoding_are_trained_at_once() -> None:
    fused = measured(2.0, 2.0, 2.0)  # critics were done in the policy's bubbles
    long = measured(10.0, 2.0, 12.0, apart=1.0)  # values of three samples wait for 12 s of critics
    for overlap in (fused, long):
        choice = choose(overlap, SEEN, apart=True, pending=True)
        assert (choice.apart, choice.kind) == (False, "faster")


def test_decoding_that_is_slowed_down_by_training_beside_it_counts() -> None:
    overlap = measured(4.0, 2.0, 2.0).with_step(0.01, beside=False).with_step(0.03, beside=False)
    assert choose(overlap, SEEN, apart=False, pending=False).apart
    once = overlap.with_step(0.02, beside=True)
    assert choose(once, SEEN, apart=True, pending=False).apart, "a machine that is busy for once is not believed"
    slower = once.with_step(0.014, beside=True)
    assert slower.contention == pytest.approx(1.4)
    assert not choose(slower, SEEN, apart=False, pending=False).apart
    seen_beside = SeenIteration(TOKENS, 0.5, tuple(1.4 * moment for moment in SEEN.finished), beside=True)
    assert predicted(slower, seen_beside) == pytest.approx(predicted(slower, SEEN))


def test_a_gain_within_the_margin_begins_nothing_and_ends_nothing() -> None:
    overlap = measured(4.0, 3.9, 0.1)
    gain = OverlapChoice(True, "faster", *predicted(overlap, SEEN))
    assert 0 < gain.unchanged - gain.overlapped < MARGIN * gain.overlapped
    for apart in (False, True):
        assert choose(overlap, SEEN, apart=apart, pending=False).apart is apart


@pytest.mark.parametrize(("apart", "pending"), [(False, False), (True, False), (True, True)])
def test_the_other_way_is_measured_again_after_a_while(apart: bool, pending: bool) -> None:
    """While critics are trained apart, those of the previous iteration are pending when an iteration begins."""
    overlap = measured(4.0, 2.0, 2.0) if apart else measured(2.0, 2.0, 2.0)
    for _ in range(REMEASURE):
        overlap = overlap.older()
        overlap = overlap.with_parts(TOKENS, 2.0, 2.0) if apart else overlap.with_together(TOKENS, 2.0)
    assert choose(overlap, SEEN, apart=apart, pending=pending) == OverlapChoice(not apart, "again")
    assert apart or choose(overlap, SEEN, apart=apart, pending=True).kind == "faster", "a probe that is in progress"
    again = overlap.with_together(TOKENS, 4.0) if apart else overlap.with_parts(TOKENS, 2.0, 2.0)
    assert choose(again, SEEN, apart=apart, pending=False).apart is apart


@pytest.mark.parametrize(("power", "expected"), [(1, 9.0), (0, 3.0)])
def test_training_counts_by_tokens_or_by_iterations_whatever_scatters_less(power: int, expected: float) -> None:
    overlap = MeasuredOverlap()
    for tokens in (500.0, 1000.0, 2000.0):
        seconds = 3.0 * (tokens / TOKENS) ** power
        overlap = overlap.with_together(tokens, seconds).with_parts(tokens, seconds / 2, seconds / 2)
    assert overlap.training(3 * TOKENS) == pytest.approx((expected, expected / 2, expected / 2))


def test_one_slow_iteration_changes_no_choice() -> None:
    overlap = measured(4.0, 2.0, 2.0).with_together(TOKENS, 4.0)
    assert choose(overlap.with_together(TOKENS, 400.0), SEEN, apart=False, pending=False).apart
    held_up = overlap.with_parts(TOKENS, 2.0, 2.0).with_parts(TOKENS, 50.0, 2.0)
    assert choose(held_up, SEEN, apart=True, pending=False).apart


SECONDS = st.floats(1e-3, 50.0)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8), SECONDS, st.booleans())
def test_what_is_chosen_is_never_predicted_to_be_slower(
    together: float, policy: float, critics: float, publishing: float, finished: list[float], each: float, apart: bool
) -> None:
    overlap = measured(together, policy, critics, apart=each)
    choice = choose(overlap, SeenIteration(TOKENS, publishing, tuple(finished), False), apart=apart, pending=False)
    off, on = choice.unchanged, choice.overlapped
    assert on <= off if choice.apart else on * (1 + MARGIN) >= off


@given(st.lists(SECONDS, min_size=1, max_size=6), SECONDS, SECONDS)
def test_what_was_measured_survives_being_written_down(seconds: list[float], policy: float, critics: float) -> None:
    overlap = measured(1.0, policy, critics).with_step(0.1, beside=True).older()
    for value in seconds:
        overlap = overlap.with_together(TOKENS, value)
    assert len(overlap.together) <= WINDOW
    written = json.loads(json.dumps(document(overlap, faster=True)))
    assert read_facts(written) == (overlap, True)


@pytest.mark.parametrize(
    "damage",
    [
        {"together": ["x"]},
        {"policy": None},
        {"critics": [[0.0, 1.0]]},
        {"critics": [[1.0, 10**400]]},
        {"apart": -1.0},
        {"apart": 10**400},
        {"apart_age": float("nan")},
    ],
)
def test_what_cannot_have_been_measured_is_refused(damage: dict[str, object]) -> None:
    written = document(measured(1.0, 1.0, 1.0), faster=False)
    with pytest.raises(ValueError, match="overlap"):
        read_facts({**written, "measured": {**written["measured"], **damage}})
    with pytest.raises(ValueError, match="no mapping"):
        read_facts({"measured": 3})
