"""Advantages within a group, by hand, and with abstained samples."""

import numpy as np
import pytest
import torch

from rlhf_workers.losses.group_advantages import group_advantages


def test_two_groups_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0])
    groups = torch.tensor([7, 7, 7, 3, 3, 3])
    got = group_advantages(rewards, groups, torch.ones(6, dtype=torch.bool), scale=True)
    assert got.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], abs=1e-5)
    got = group_advantages(3 * rewards, groups, torch.ones(6, dtype=torch.bool), scale=False)
    assert got.tolist() == [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0]


def test_an_abstained_sample_is_not_a_zero_reward() -> None:
    rewards = torch.tensor([1.0, 3.0, float("nan"), 4.0, float("nan")])
    groups = torch.tensor([0, 0, 0, 1, 1])
    valid = torch.tensor([True, True, False, True, False])
    got = group_advantages(rewards, groups, valid, scale=False)
    assert got.tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]  # the lone fourth sample has nothing to compare with


def test_scaled_advantages_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(6, 8))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    groups = torch.arange(6).repeat_interleave(8)
    got = group_advantages(torch.tensor(rewards.ravel()), groups, torch.ones(48, dtype=torch.bool), scale=True)
    np.testing.assert_allclose(got.numpy(), expected.ravel(), atol=1e-5)
