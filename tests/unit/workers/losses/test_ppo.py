"""Clipped losses: closed forms, and gradients against finite differences."""

import numpy as np
import pytest
import torch

from rlhf_workers.losses.ppo import policy_loss, value_loss

RATIOS = np.array([0.5, 0.9, 1.0, 1.15, 1.5, 0.5, 0.9, 1.0, 1.15, 1.5])
ADVANTAGES = np.array([1.0, 2.0, 3.0, 1.0, 2.0, -1.0, -2.0, -3.0, -1.0, -2.0])


def surrogate(log_p: np.ndarray) -> np.ndarray:
    """Eq. 7 with clip 0.2 below, 0.1 above; old log-probabilities are -1."""
    ratio = np.exp(log_p + 1.0)
    loss: np.ndarray = -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.1) * ADVANTAGES)
    return loss


def test_policy_loss_equals_the_surrogate_and_its_slope() -> None:
    log_p = np.log(RATIOS) - 1.0
    inputs = torch.tensor(log_p, requires_grad=True)
    got = policy_loss(inputs, torch.full((10,), -1.0).double(), torch.tensor(ADVANTAGES), 0.2, 0.1)
    np.testing.assert_allclose(got.loss.detach().numpy(), surrogate(log_p), rtol=1e-12)
    above = (np.array(ADVANTAGES) > 0) & (RATIOS > 1.1)
    below = (np.array(ADVANTAGES) < 0) & (RATIOS < 0.8)
    assert got.clipped_high.tolist() == above.tolist()
    assert got.clipped_low.tolist() == below.tolist()
    assert got.clipped.tolist() == [False, False, False, True, True, True, False, False, False, False]
    (slope,) = torch.autograd.grad(got.loss.sum(), inputs)
    step = 1e-6
    numeric = (surrogate(log_p + step) - surrogate(log_p - step)) / (2 * step)
    np.testing.assert_allclose(slope.numpy(), numeric, atol=1e-7)


def test_at_the_old_policy_the_loss_is_minus_the_advantage_and_nothing_is_clipped() -> None:
    log_p = torch.tensor([-1.0, -2.0])
    got = policy_loss(log_p, log_p, torch.tensor([3.0, -4.0]), 0.2, 0.2)
    assert got.loss.tolist() == [-3.0, 4.0]
    assert not got.clipped.any()


@pytest.mark.parametrize(("clip", "expected"), [(None, [0.5 * 4.0, 0.5 * 0.25]), (0.2, [0.5 * 4.0, 0.5 * 0.64])])
def test_value_loss_takes_the_larger_of_plain_and_clipped(clip: float | None, expected: list[float]) -> None:
    """Old value 0, return 1. V = 3: clipped to 0.2 is nearer, plain 4 wins. V = 0.5: clipped (0.8)^2 wins."""
    values = torch.tensor([3.0, 0.5], requires_grad=True)
    got = value_loss(values, torch.zeros(2), torch.ones(2), clip)
    assert got.loss.tolist() == pytest.approx(expected)
    got.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([2.0, -0.5 if clip is None else 0.0])
