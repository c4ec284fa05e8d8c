"""Rewards are shaped by closed forms of the batch without abstained samples; the defaults change nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.algorithms.combination import Combination, Combine
from rlhf_api.job.reward_shaping import RewardShaping
from rlhf_workers.training.batches.reward_shaping import normalized_sum, shaped
from rlhf_workers.training.batches.training_batch import TrainingBatch, micro_batch

LONGEST = 8
LENGTHS = (2, 5, 8, 8)
REWARDS = (1.0, -2.0, 4.0, 0.5)
FINISHED = (True, True, False, True)
REWARD = st.floats(-100, 100, width=32)


def batch_of(rewards: tuple[float, ...] = REWARDS, valid: tuple[bool, ...] = (True,) * 4) -> TrainingBatch:
    lengths, there = torch.tensor(LENGTHS), torch.tensor(valid)
    return TrainingBatch(
        prompts=(torch.zeros(1, dtype=torch.int64),) * 4,
        responses=torch.arange(4 * LONGEST).view(4, LONGEST),
        response_lengths=lengths,
        mask=(torch.arange(LONGEST)[None] < lengths[:, None]) & there[:, None],
        groups=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor(rewards) * there,
        valid=there,
        finished=torch.tensor(FINISHED),
        fields={},
    )


def rewards_of(batch: TrainingBatch, **shaping: Any) -> list[float]:
    result: list[float] = shaped(batch, RewardShaping(**shaping), None, LONGEST)[0].rewards.tolist()
    return result


def test_the_defaults_return_the_batch_itself() -> None:
    batch = batch_of()
    assert shaped(batch, RewardShaping(), None, LONGEST) == (batch, {})
    combination = Combination((("a", 1.0),), Combine.MIN)
    assert shaped(batch, RewardShaping(combine="Min"), combination, LONGEST)[0] is batch


def test_the_overlong_penalty_is_that_of_dapo() -> None:
    """max(-p, min(0, -(length - (L - B)) / B p)), with L 8, B 4, p 2."""
    penalties = [0.0, -0.5, -2.0, -2.0]
    expected = [reward + penalty for reward, penalty in zip(REWARDS, penalties, strict=True)]
    assert rewards_of(batch_of(), overlong_buffer=4, overlong_penalty=2.0) == expected


def test_a_response_without_an_end_costs_its_penalty() -> None:
    assert rewards_of(batch_of(), missing_end_penalty=0.25) == [1.0, -2.0, 3.75, 0.5]


def test_scale_comes_before_bounds() -> None:
    assert rewards_of(batch_of(), scale=2.0, minimum=-3.0, maximum=3.0) == [2.0, -3.0, 3.0, 1.0]


@given(st.tuples(*[REWARD] * 4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_normalised_rewards_have_mean_0_and_deviation_1_over_those_that_are_there(
    rewards: tuple[float, ...], valid: list[bool]
) -> None:
    batch = batch_of(rewards, tuple(valid))
    result = np.array(rewards_of(batch, normalize="Batch"), np.float64)
    own, given_rewards = result[valid], np.array(rewards)[valid]
    assert (result[~np.array(valid)] == 0).all()
    if len(own) and given_rewards.std() > 1e-3:
        assert np.allclose(own, (given_rewards - given_rewards.mean()) / given_rewards.std(), atol=1e-3)
    assert np.isfinite(result).all()


@given(st.lists(st.one_of(REWARD, st.just(float("nan"))), min_size=4, max_size=4), st.tuples(*[REWARD] * 4))
def test_each_reward_is_normalised_over_those_that_have_it_and_then_added(
    first: list[float], second: tuple[float, ...]
) -> None:
    parts = {"a": torch.tensor(first), "b": torch.tensor(second)}
    combination = Combination((("a", 2.0), ("b", -1.0)), Combine.NORMALIZED_SUM)
    result = normalized_sum(parts, combination, torch.ones(4, dtype=torch.bool)).numpy()
    expected = np.zeros(4)
    for values, weight in ((np.array(first, np.float32), 2.0), (np.array(second, np.float32), -1.0)):
        wide = values.astype(np.float64)
        own = wide[~np.isnan(wide)]
        if len(own):
            expected += weight * np.nan_to_num((wide - own.mean()) / (own.std() + 1e-8))
    assert np.allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["Mask", "Filter"])
def test_a_response_that_was_cut_is_in_no_loss_and_filtered_in_no_baseline_either(way: str) -> None:
    batch = shaped(batch_of(), RewardShaping.model_validate({"truncated": way}), None, LONGEST)[0]
    assert batch.mask.any(dim=1).tolist() == [True, True, False, True]
    assert batch.valid.tolist() == [True, True, way == "Mask", True]
    cut = micro_batch(batch, [1, 2, 3], {})
    assert cut.targets.tolist() == [*range(8, 13), *range(24, 32)]
    assert len(cut.positions) == len(cut.targets)


@given(st.tuples(*[REWARD] * 4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_filtered_response_is_shaped_as_one_that_abstained(rewards: tuple[float, ...], valid: list[bool]) -> None:
    shaping = {"normalize": "Batch", "minimum": -50.0, "overlong_buffer": 4}
    filtered, metrics = shaped(
        batch_of(rewards, tuple(valid)), RewardShaping.model_validate(shaping | {"truncated": "Filter"}), None, LONGEST
    )
    there = tuple(is_valid and finished for is_valid, finished in zip(valid, FINISHED, strict=True))
    abstained, expected = shaped(batch_of(rewards, there), RewardShaping.model_validate(shaping), None, LONGEST)
    assert filtered.rewards.tolist() == abstained.rewards.tolist()
    assert filtered.valid.tolist() == abstained.valid.tolist()
    assert metrics == expected | {"shaping/filtered": float(valid[2])}


def test_a_filtered_response_is_in_no_normalised_sum() -> None:
    parts = {"a": torch.tensor([1.0, 2.0, 1000.0, 3.0])}
    combination, batch = Combination((("a", 1.0),), Combine.NORMALIZED_SUM), batch_of()
    shaping = RewardShaping(combine="NormalizedSum", truncated="Filter")
    result = shaped(replace(batch, parts=parts), shaping, combination, LONGEST)[0].rewards
    assert result.tolist() == pytest.approx([-(1.5**0.5), 0.0, 0.0, 1.5**0.5])
