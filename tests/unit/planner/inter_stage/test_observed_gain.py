"""The gain of speculation is learned from steps, and the cost of plain steps only from plain steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_planner.speculation.forecast import NO_SPECULATION
from rlhf_planner.speculation.observed_gain import DraftedSteps, observed_forecast


def plain(rows: float, keys: float) -> float:
    return 0.01 + 0.001 * rows + 1e-6 * rows * keys


def stretch(rows: float, tokens: float, cost: float, verified: float = 50) -> DraftedSteps:
    return DraftedSteps(50, rows, 100, tokens, 50 * cost * plain(rows, 100), verified)


def test_a_forecast_is_what_the_last_steps_gave_and_took() -> None:
    first = observed_forecast(
        NO_SPECULATION, [stretch(1, 3, 1.2), stretch(16, 1, 1.01, verified=0)], plain, zero_allowed=True
    )
    (alone, many) = first.points
    assert (alone.batch, alone.tokens, alone.cost) == pytest.approx((1, 3, 1.2))
    assert (many.tokens, many.cost) == (1, 1), "nothing was verified there"
    again = observed_forecast(first, [stretch(1, 2, 1.2)], plain, zero_allowed=True)
    assert again.points[0].tokens == pytest.approx(2.5)
    assert again.points[1] == many
    assert not observed_forecast(again, [stretch(1, 2, 1.2)], plain, zero_allowed=False).zero_allowed


def test_what_steps_gave_counts_at_the_samples_that_they_had() -> None:
    """Not at the power of two by which they are grouped: batches between are predicted from it."""
    steps = [stretch(3, 4, 1.3), stretch(3, 4, 1.3), stretch(5, 3, 1.4)]
    first = observed_forecast(NO_SPECULATION, steps, plain, zero_allowed=True)
    assert [point.batch for point in first.points] == pytest.approx([11 / 3])
    again = observed_forecast(first, [stretch(3, 4, 1.3), stretch(1, 5, 1.2)], plain, zero_allowed=True)
    assert [point.batch for point in again.points] == pytest.approx([1, (11 / 3 + 3) / 2])


def test_a_few_steps_count_where_steps_are_slow_and_not_where_they_were_held_up() -> None:
    slow = DraftedSteps(3, 4, 100, 3, 3 * 1.2 * 10 * plain(4, 100), 3)
    forecast = observed_forecast(NO_SPECULATION, [slow], lambda rows, keys: 10 * plain(rows, keys), zero_allowed=True)
    assert (forecast.points[0].tokens, forecast.points[0].cost) == pytest.approx((3, 1.2))
    held_up = DraftedSteps(3, 4, 100, 3, 5.0, 3)
    assert observed_forecast(NO_SPECULATION, [held_up], plain, zero_allowed=True) == NO_SPECULATION


def test_where_nothing_was_ever_verified_there_is_no_forecast() -> None:
    assert observed_forecast(NO_SPECULATION, [stretch(4, 1, 0.9, verified=0)], plain, zero_allowed=True) == (
        NO_SPECULATION
    )


@given(st.lists(st.tuples(*[st.floats(0, 1e12)] * 6), max_size=6))
def test_whatever_workers_say_a_forecast_is_possible_or_none(rows: list[tuple[float, ...]]) -> None:
    forecast = observed_forecast(NO_SPECULATION, [DraftedSteps(*row) for row in rows], plain, zero_allowed=True)
    tokens, cost = forecast.factors([1, 7, 300])
    assert (tokens >= cost).all()
    assert (cost > 0).all()
