"""Several rewards become one number by the configured formula; an abstained reward does not count as zero."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.algorithms.combination import Combination, Combine

NUMBERS = st.floats(-1e6, 1e6)
NAMES = ("a", "b", "c")
REWARDS = st.dictionaries(st.sampled_from(NAMES), NUMBERS, min_size=1)
WEIGHTS = st.tuples(*[st.floats(0.1, 10)] * len(NAMES))


def combined(
    method: Combine, weights: tuple[float, ...], rewards: dict[str, float], factor: float = 1.0
) -> float | None:
    return Combination(tuple(zip(NAMES, weights, strict=True)), method, factor).combine(rewards)


@given(REWARDS, WEIGHTS, st.floats(0, 4))
def test_every_combination_is_its_formula(rewards: dict[str, float], weights: tuple[float, ...], factor: float) -> None:
    by_name = dict(zip(NAMES, weights, strict=True))
    r, w = np.array(list(rewards.values())), np.array([by_name[name] for name in rewards])
    mean = np.average(r, weights=w)
    expected = {
        Combine.SUM: (w * r).sum(),
        Combine.NORMALIZED_SUM: (w * r).sum(),
        Combine.MIN: (w * r).min(),
        Combine.MEAN_MINUS_VARIANCE: mean - factor * np.average((r - mean) ** 2, weights=w),
    }
    for method, number in expected.items():
        result = combined(method, weights, rewards, factor)
        assert result is not None
        assert np.isclose(result, number, rtol=1e-9, atol=1e-3), method


@given(REWARDS, WEIGHTS, st.permutations(NAMES))
def test_the_order_in_which_rewards_came_is_of_no_account(
    rewards: dict[str, float], weights: tuple[float, ...], order: list[str]
) -> None:
    shuffled = {name: rewards[name] for name in order if name in rewards}
    for method in Combine:
        assert combined(method, weights, rewards) == combined(method, weights, shuffled)


def test_where_all_abstained_there_is_no_number() -> None:
    for method in Combine:
        assert combined(method, (1.0, 1.0, 1.0), {}) is None
        assert combined(method, (1.0, 2.0, 3.0), {"b": -3.0}) == (
            -3.0 if method is Combine.MEAN_MINUS_VARIANCE else -6.0
        )


def test_rewards_that_agree_are_worth_more_than_such_as_do_not_on_the_same_mean() -> None:
    agree, differ = {"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 2.0}
    weights = (1.0, 1.0, 1.0)
    assert combined(Combine.MEAN_MINUS_VARIANCE, weights, agree, 0.5) == 1.0
    assert combined(Combine.MEAN_MINUS_VARIANCE, weights, differ, 0.5) == 0.5
