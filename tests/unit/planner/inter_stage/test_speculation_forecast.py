"""Expected effect of drafts, and its effect on the simulation of an iteration and on its plans."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.choose import TIE, choose
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.inter_stage.simulated_generation import generate
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast, SpeculationPoint


@st.composite
def forecasts(draw: st.DrawFn) -> SpeculationForecast:
    batches = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)))
    ratio = st.floats(1.0, 6.0)
    return SpeculationForecast(tuple(SpeculationPoint(b, draw(ratio), draw(ratio) * 0.01, 0.01) for b in batches))


@settings(deadline=None, max_examples=30)
@given(make.iterations(), make.costs(), st.integers(0, 45), st.integers(1, 7))
def test_drafts_that_give_nothing_and_cost_nothing_change_no_bit(
    iteration: tuple[list[int], IterationSetup], costs: StageCosts, threshold: int, pool: int
) -> None:
    lengths, setup = iteration
    idle = replace(costs, speculation=SpeculationForecast((SpeculationPoint(1, 1.0, 0.01, 0.01),)))
    slower = replace(costs, speculation=SpeculationForecast((SpeculationPoint(1, 2.0, 0.03, 0.01),)))
    without = simulate(lengths, setup, costs, threshold, pool)
    assert simulate(lengths, setup, idle, threshold, pool) == without
    assert simulate(lengths, setup, slower, threshold, pool) == without, "zero drafts are a candidate"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 3), make.costs(), forecasts())
def test_no_sample_is_predicted_later_with_drafts_when_zero_is_allowed(
    lengths: list[int], workers: int, costs: StageCosts, forecast: SpeculationForecast
) -> None:
    roomy = replace(costs, max_batch_size=max(costs.max_batch_size, len(lengths)))
    setup = IterationSetup(workers, 0, [5] * len(lengths))
    without = generate(np.array(lengths), setup, roomy).finish
    with_drafts = generate(np.array(lengths), setup, replace(roomy, speculation=forecast)).finish
    assert (with_drafts <= without * (1 + 1e-9)).all()


COSTS = StageCosts.measured(
    decode=[StepTime(1, 64, 0.010), StepTime(16, 64, 0.014)], max_batch_size=16,
    tasks={"reference": [StepTime(1, 64, 0.05), StepTime(4, 64, 0.2)]}, kv_bytes_per_token=1e3, bandwidth=1e9,
)  # fmt: skip
DRAFTS = SpeculationForecast((SpeculationPoint(1, 3.0, 0.012, 0.01), SpeculationPoint(16, 1.5, 0.02, 0.014)))


def test_a_tail_of_one_sample_is_decoded_by_as_many_steps_as_its_drafts_leave() -> None:
    setup = IterationSetup(1, 0, [4])
    plain, fast = simulate([300], setup, COSTS), simulate([300], setup, replace(COSTS, speculation=DRAFTS))
    assert fast.generation_seconds == pytest.approx(plain.generation_seconds * 1.2 / 3)
    assert fast.scoring_seconds == pytest.approx(plain.scoring_seconds)
    boundary = replace(COSTS, speculation=DRAFTS).pause_seconds(100.0) - COSTS.pause_seconds(100.0)
    assert boundary == pytest.approx(2 * 0.2 * COSTS.decode_seconds(1, 0)), "a move waits for whole steps"


RAGGED = SpeculationForecast((SpeculationPoint(6, 4.0, 0.045, 0.01), SpeculationPoint(9, 5.5, 0.0275, 0.01)))
POOR = SpeculationForecast((SpeculationPoint(1, 1.1, 0.0105, 0.01), SpeculationPoint(8, 1.05, 0.02, 0.01)))


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("forecast", [DRAFTS, RAGGED, POOR])
def test_no_plan_with_drafts_is_predicted_slower_than_without(forecast: SpeculationForecast) -> None:
    lengths = LengthModel(400).with_batch([(10, 20)] * 56 + [(10, 400)] * 8)
    setup = IterationSetup(3, 0, [10] * 36)
    plain = choose(lengths, setup, COSTS, seed=2)
    drafted = choose(lengths, setup, replace(COSTS, speculation=forecast), seed=2)
    assert drafted.off_seconds <= plain.off_seconds * (1 + 1e-9)
    assert drafted.seconds <= plain.seconds * (1 + TIE), "of plans this close any may be taken"


@given(forecasts(), st.lists(st.floats(1, 500), min_size=1, max_size=9))
def test_between_its_points_a_forecast_never_promises_less_than_plain_steps(
    forecast: SpeculationForecast, batches: list[float]
) -> None:
    tokens, cost = forecast.factors(batches)
    assert (tokens >= cost).all()
    assert (tokens >= 1).all()
    always_tokens, always_cost = forecast.always().factors([point.batch for point in forecast.points])
    for point, token, ratio in zip(forecast.points, always_tokens, always_cost, strict=True):
        assert (token, ratio) == pytest.approx((point.tokens, point.cost))


def test_a_forecast_is_written_down_with_the_costs() -> None:
    costs = replace(COSTS, speculation=DRAFTS.always())
    assert StageCosts.from_document(costs.document()) == costs
    before = {name: value for name, value in COSTS.document().items() if name != "speculation"}
    assert StageCosts.from_document(before).speculation == NO_SPECULATION, "written by the version before"


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([(4, 2, 1, 1), (4, 2, 1, 1)], "must rise"),
        ([(1, 0.5, 1, 1)], "at least 1 token"),
        ([(1, 2, float("nan"), 1)], "finite times"),
        ([(1, 2, 1)], "missing"),
        ([(1, 2, 1, "x")], "could not convert"),
        ([(1, 2, 1, 10**400)], "too large"),
        (None, "not iterable"),
    ],
)
def test_an_impossible_forecast_says_what_is_wrong(points: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SpeculationForecast.from_document({"points": points, "zero_allowed": True})


def test_points_and_gains_belong_together() -> None:
    for point in DRAFTS.points:
        assert point.gain == pytest.approx(point.tokens * point.plain_seconds / point.seconds)
    for point, next_point in itertools.pairwise(DRAFTS.points):
        assert point.gain > next_point.gain
