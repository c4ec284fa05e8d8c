"""The benchmark of regrets runs, and the chosen plan is near the best on devices that the search only profiles."""

import pytest
from benchmarks.plan_regret import CASES, kendall_tau, result_of


def test_the_chosen_plan_is_near_the_best_that_was_measured() -> None:
    result = result_of(CASES[4], 3)
    assert result["plans"] > 50
    assert 0 <= result["regret"] <= 0.05
    assert result["tau"] >= 0.8
    assert result["rules"]["half and half"] > result["regret"]


def test_tau_counts_pairs_in_the_same_order() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
