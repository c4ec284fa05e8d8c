"""The Lagrange multiplier and its weighted advantages, against independent formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.losses.lagrangian import MAX_FALL, MIN_LOG_MULTIPLIER, combined_advantages, moved_log_multiplier


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=5),
    st.floats(0, 1e6),
)
def test_advantages_are_a_weighted_mean_of_rewards_and_of_costs_with_the_other_sign(
    pairs: list[tuple[float, float]], multiplier: float
) -> None:
    rewards, costs = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    got = combined_advantages(rewards, costs, multiplier)
    weight = multiplier / (1 + multiplier)
    for value, (reward, cost) in zip(got.tolist(), pairs, strict=True):
        assert value == pytest.approx((1 - weight) * reward - weight * cost, abs=1e-9)


@pytest.mark.parametrize(
    ("nu", "excess", "rate", "maximum", "expected"),
    [
        (0.0, 2.0, 0.1, 5.0, 0.2),
        (math.log(2), 3.0, 0.1, 5.0, math.log(2) + 0.6),
        (math.log(2), -3.0, 0.1, 5.0, math.log(2) - 0.6),
        (math.log(4), 9.0, 0.1, 5.0, math.log(5)),
        (1.0, 0.0, 0.1, 5.0, 1.0),
        (1.0, 7.0, 0.0, 5.0, 1.0),
        (math.log(5), -1e9, 1.0, 5.0, math.log(5) - MAX_FALL),
        (MIN_LOG_MULTIPLIER + 0.5, -1e30, 1.0, 5.0, MIN_LOG_MULTIPLIER),
        (MIN_LOG_MULTIPLIER, 1e9, 1.0, 5.0, MIN_LOG_MULTIPLIER + 1e9 * math.exp(MIN_LOG_MULTIPLIER)),
    ],
)
def test_nu_moves_by_the_excess_times_lambda_and_lambda_stays_below_its_maximum(
    nu: float, excess: float, rate: float, maximum: float, expected: float
) -> None:
    assert moved_log_multiplier(nu, excess, rate, maximum) == pytest.approx(expected, abs=1e-12)


@given(st.floats(-20, 2), st.floats(-1e6, 1e6), st.floats(1e-6, 1))
def test_the_step_is_the_gradient_of_the_multiplier_times_the_excess(nu: float, excess: float, rate: float) -> None:
    parameter = torch.tensor(nu, dtype=torch.float64, requires_grad=True)
    (-(excess * parameter.exp())).backward()
    assert parameter.grad is not None
    stepped = nu + max(-rate * float(parameter.grad), -MAX_FALL)
    assert moved_log_multiplier(nu, excess, rate, 1e300) == pytest.approx(
        max(MIN_LOG_MULTIPLIER, min(stepped, math.log(1e300)))
    )


@given(st.floats(-20, 1.6), st.floats(0.1, 1e12), st.floats(1e-3, 1))
def test_an_equal_excess_regains_a_third_of_a_fall_at_once(nu: float, excess: float, rate: float) -> None:
    """A large step down must not leave a multiplier that no cost raises."""
    fallen = moved_log_multiplier(nu, -excess, rate, 5.0)
    risen = moved_log_multiplier(fallen, excess, rate, 5.0)
    assert risen == pytest.approx(math.log(5)) or risen - fallen >= (nu - fallen) * 0.36
