"""A plan is changed only after it drifted, by figures of the run, and if the change pays for its restart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_planner.plan_search.replanning import (
    DECISIVE,
    DRIFT_SHARE,
    GAIN_OVER_COST,
    ITERATIONS,
    PlanHistory,
    PlanProspect,
    decide,
    drift_reason,
    gain_share,
    is_worth,
)

SECONDS = st.floats(0.01, 1000.0)
STAGES = ("generate", "score", "train", "publish")
ASSUMED = st.frozensets(st.sampled_from(STAGES))


def history(*measured: float, predicted: float = 1.0, left: int = 100, restart: float = 1.0) -> PlanHistory:
    """Return the history of iterations of so many seconds, all of them of training."""
    return PlanHistory(predicted, {"train": predicted}, [{"train": each} for each in measured], False, left, restart)


def prospect(seconds: float, assumed: frozenset[str] = frozenset(), stage: str = "train") -> PlanProspect:
    return PlanProspect(f"plan of {seconds} s", seconds, {stage: seconds}, assumed)


@st.composite
def prospects(draw: st.DrawFn) -> PlanProspect:
    """Draw a plan whose stages do not overlap."""
    stages = {name: draw(SECONDS) for name in STAGES}
    return PlanProspect("a plan", sum(stages.values()), stages, draw(ASSUMED))


@pytest.mark.parametrize(
    ("measured", "drifts"),
    [
        ((1.21, 1.3, 5.0), True),
        ((1.0, 1.21, 1.3, 5.0), True),
        ((0.79, 0.5, 0.7), True),
        ((1.3, 1.3), False),
        ((1.3, 1.3, 1.19), False),
        ((1.3, 0.7, 1.3), False),
        ((5.0, 5.0, 1.3, 1.0, 1.3), False),
    ],
)
def test_a_plan_drifts_when_the_last_iterations_are_all_off_in_one_direction(
    measured: tuple[float, ...], drifts: bool
) -> None:
    assert bool(drift_reason(history(*measured))) == drifts


def test_the_reason_names_the_seconds_and_the_worst_stage() -> None:
    stages = {"generate": 1.0, "train": 1.0}
    seen = [{"generate": 1.1, "train": 4.0, "score": 0.0}] * ITERATIONS
    reason = drift_reason(PlanHistory(2.0, stages, seen, False, 9, 1.0))
    assert reason == "iterations take 5.1 s instead of the predicted 2 s; most of it in train: 4 s instead of 1 s"
    assert drift_reason(PlanHistory(5.0, {}, seen, True, 9, 1.0)) == "response lengths have drifted"
    assert not drift_reason(PlanHistory(5.0, {}, seen[1:], True, 9, 1.0)), "too few iterations"


@given(SECONDS, st.lists(SECONDS, max_size=8))
def test_drift_depends_on_the_last_iterations_relative_to_the_prediction(
    predicted: float, measured: list[float]
) -> None:
    found = bool(drift_reason(history(*measured, predicted=predicted)))
    shares = [seconds / predicted - 1 for seconds in measured[-ITERATIONS:]]
    certain = len(shares) == ITERATIONS and (min(shares) > DRIFT_SHARE * 1.001 or max(shares) < -DRIFT_SHARE * 1.001)
    possible = len(shares) == ITERATIONS and (min(shares) > DRIFT_SHARE * 0.999 or max(shares) < -DRIFT_SHARE * 0.999)
    assert certain <= found <= possible


@given(prospects(), prospects(), st.lists(SECONDS, max_size=6), st.integers(0, 1000), SECONDS)
def test_a_changed_plan_pays_for_its_restart_by_known_figures(
    own: PlanProspect, best: PlanProspect, measured: list[float], left: int, restart: float
) -> None:
    verdict = decide(history(*measured, left=left, restart=restart), own, best)
    assert verdict.gain_seconds >= 0
    assert verdict.reason
    if verdict.replan:
        assert len(measured) >= ITERATIONS
        assert not own.assumed & set(DECISIVE)
        assert is_worth(verdict.gain_seconds, left, restart)
        assert verdict.gain_seconds * left >= GAIN_OVER_COST * restart
        countable = sum(max(0.0, own.stages[name] - best.stages[name]) for name in STAGES if name not in best.assumed)
        assert verdict.gain_seconds <= verdict.measured_seconds * countable / own.seconds * 1.001


@given(prospects(), prospects(), SECONDS, SECONDS)
def test_more_iterations_and_cheaper_restarts_never_turn_a_change_down(
    own: PlanProspect, best: PlanProspect, seconds: float, restart: float
) -> None:
    measured = [seconds] * ITERATIONS
    if decide(history(*measured, left=10, restart=restart), own, best).replan:
        assert decide(history(*measured, left=11, restart=restart), own, best).replan
        assert decide(history(*measured, left=10, restart=restart / 2), own, best).replan


@given(prospects(), SECONDS)
def test_the_plan_in_force_is_no_gain_over_itself(own: PlanProspect, seconds: float) -> None:
    assert gain_share(own, own) == 0
    verdict = decide(history(*[seconds] * ITERATIONS), own, None)
    assert not verdict.replan
    assert verdict.measured_seconds == seconds
    assert "no other plan" in verdict.reason


def test_what_keeps_a_plan_is_named() -> None:
    slow = history(*[4.0] * ITERATIONS)
    changed = decide(slow, prospect(2.0), prospect(1.0))
    assert changed.replan
    assert changed.gain_seconds == 2.0, "half of the measured seconds"
    assert changed.reason == (
        "plan of 1.0 s is predicted to save 2 s per iteration, 200 s in 100 iterations, for a restart of 1 s"
    )
    late = decide(history(*[4.0] * ITERATIONS, left=1), prospect(2.0), prospect(1.0))
    assert "less than 3 times its cost" in late.reason
    guessed = decide(slow, prospect(2.0, frozenset({"train"})), prospect(1.0))
    assert "the figures of train are assumed" in guessed.reason
    hoped = decide(slow, prospect(2.0), prospect(1.0, frozenset({"train"})))
    assert "by the figures of this run" in hoped.reason
    unknown = decide(history(*[4.0] * ITERATIONS, restart=math.inf), prospect(2.0), prospect(1.0))
    assert "no restart was measured" in unknown.reason
    assert not any(each.replan for each in (late, guessed, hoped, unknown))
