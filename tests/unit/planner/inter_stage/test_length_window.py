"""Simulated sorted windows: their gain follows from how much of the lengths prompts explain."""

import numpy as np
import pytest
from tests.support.plans.simulated_periods import learned, period_setup, stage_costs

from rlhf_planner.inter_stage.length_window import WindowForecast, forecast_window


def forecast(
    share: float, sigma: float = 1.1, window: int = 5, *, limit: int = 1024, median: float = 60
) -> WindowForecast:
    model = learned(12, share, median, sigma, limit)
    return forecast_window(model, period_setup(12), stage_costs(), window, seed=1)


def test_windows_gain_by_what_prompts_explain() -> None:
    strong, weak = forecast(0.8), forecast(0.2)
    assert strong.gain > 0.15
    assert strong.gain > weak.gain
    assert strong.samples_per_second == pytest.approx(strong.in_order / (1 - strong.gain))
    assert "worth it" in strong.reason
    assert "prompts explain" in strong.reason


def test_a_window_of_one_iteration_gains_nothing_without_fusion() -> None:
    assert abs(forecast(0.6, window=1).gain) < 0.05


def test_where_most_responses_reach_the_limit_sorting_gains_little() -> None:
    answer = forecast(0.3, 0.5, limit=64, median=256)
    assert answer.gain < 0.05
    assert "not above the margin" in answer.reason


def test_a_long_window_is_forecast_with_few_choices_of_fusion_and_gains_at_least_as_much() -> None:
    short, long = forecast(0.6, window=2), forecast(0.6, window=24)
    assert long.gain > short.gain - max(0.05, short.error)
    assert np.isfinite(long.error)
