"""GAE, token rewards and whitening against explicit sums in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.losses.gae import advantages_and_returns, token_rewards, whiten


def mask_of(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def test_three_tokens_by_hand() -> None:
    """gamma 0.5, lambda 0.5: deltas are 1 + .5*2 - 1 = 1, 2 + .5*3 - 2 = 1.5, 3 - 3 = 0."""
    advantages, returns = advantages_and_returns(
        torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 3.0]]), mask_of([3], 3), 0.5, 0.5
    )
    assert advantages.tolist() == [[1 + 0.25 * 1.5, 1.5, 0.0]]
    assert returns.tolist() == [[2.375, 3.5, 3.0]]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_gae_is_the_discounted_sum_of_later_deltas(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, len(lengths), 8))
    got, returns = advantages_and_returns(torch.tensor(rewards), torch.tensor(values), mask_of(lengths, 8), gamma, lam)
    for row, length in enumerate(lengths):
        v = np.append(values[row, :length], 0.0)
        delta = [rewards[row, t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(8):
            expected = sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, length)) if t < length else 0.0
            assert float(got[row, t]) == pytest.approx(expected, abs=1e-5)
            assert float(returns[row, t]) == pytest.approx(expected + v[t] if t < length else 0.0, abs=1e-5)


def test_lambda_one_gives_the_monte_carlo_return_and_lambda_zero_the_one_step_error() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 4.0]]), torch.tensor([[1.0, -2.0, 0.5]])
    _, returns = advantages_and_returns(rewards, values, mask_of([3], 3), 1.0, 1.0)
    assert returns.tolist() == [[4.0, 4.0, 4.0]]
    advantages, _ = advantages_and_returns(rewards, values, mask_of([3], 3), 1.0, 0.0)
    assert advantages.tolist() == [[-3.0, 2.5, 3.5]]


def test_the_reward_is_on_the_last_token_and_kl_on_every_one() -> None:
    kl = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    got = token_rewards(torch.tensor([10.0, 20.0]), kl, mask_of([2, 1], 3), 0.5)
    assert got.tolist() == [[-0.5, 9.0, 0.0], [18.5, 0.0, 0.0]]


def test_a_masked_out_sample_gets_no_reward_and_changes_no_mean() -> None:
    mask = mask_of([2, 0], 2)
    got = token_rewards(torch.tensor([1.0, 99.0]), torch.zeros(2, 2), mask, 0.1)
    assert got.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    white = whiten(torch.tensor([[1.0, 3.0], [99.0, 99.0]]), mask)
    assert white.tolist() == [[pytest.approx(-1.0), pytest.approx(1.0)], [0.0, 0.0]]


def test_whitening_a_single_token_or_none_does_not_divide_by_zero() -> None:
    assert whiten(torch.tensor([[5.0]]), mask_of([1], 1)).tolist() == [[0.0]]
    assert whiten(torch.tensor([[5.0]]), mask_of([0], 1)).tolist() == [[0.0]]
