"""Greedy responses leave the batch, and their rewards become the baselines of the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.model_folders import models
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_workers.algorithms.base import Algorithm
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.training.batches.greedy_baselines import without_greedy
from rlhf_workers.training.batches.training_batch import TrainingBatch

CPU = torch.device("cpu")
Numbers = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("model"), "llama", seed=1)


def remax(folder: Path, **fields: Any) -> Algorithm:
    chosen = {"remax": {"miniBatchSize": 6, "groupSize": 3, **fields}}
    return build_algorithm(make_job(folder, algorithm=chosen, rollout={"batchSize": 6}).spec, CPU)


def of_two_prompts(*abstained: int) -> TrainingBatch:
    """Return three responses to each prompt and a greedy one, sample by sample."""
    return make_batch("grpo", abstained=abstained)


@settings(max_examples=25, deadline=None)
@given(
    per_prompt=st.integers(2, 5),
    prompts=st.integers(1, 4),
    chosen=st.sets(st.integers(0, 19)),
)
def test_what_is_left_is_the_samples_beside_the_reward_of_their_greedy_one(
    per_prompt: int, prompts: int, chosen: set[int]
) -> None:
    size = per_prompt * prompts
    abstained = [sample for sample in sorted(chosen) if sample < size]
    batch = make_batch("grpo", count=size, abstained=abstained)
    left = without_greedy(batch, per_prompt)
    rows = [row for row in range(size) if row % per_prompt != per_prompt - 1]
    assert len(left.prompts) == len(left.valid) == len(rows) == prompts * (per_prompt - 1)
    for place, row in enumerate(rows):
        greedy = row // per_prompt * per_prompt + per_prompt - 1
        assert left.prompts[place] is batch.prompts[row]
        assert left.responses[place].equal(batch.responses[row])
        assert left.baselines is not None
        if {row, greedy} & set(abstained):
            assert not left.valid[place]
            assert not left.mask[place].any(), "no number is made up: it is trained on by nothing"
            assert left.rewards[place] == left.baselines[place] == 0
        else:
            assert left.mask[place].equal(batch.mask[row])
            assert (left.rewards[place], left.baselines[place]) == (batch.rewards[row], batch.rewards[greedy])


def advantages_by_formula(batch: TrainingBatch, row: int, greedy: int, beta: float) -> Numbers:
    """Return A_t = sum over s >= t of r_s, less R(greedy); r = -beta (o - r), and R at the last token."""
    length = int(batch.response_lengths[row])
    old = batch.fields["log_probabilities"][row, :length].double().numpy()
    reference = batch.fields["reference_log_probabilities"][row, :length].double().numpy()
    rewards = -beta * (old - reference)
    rewards[-1] += float(batch.rewards[row])
    return np.array([rewards[start:].sum() for start in range(length)]) - float(batch.rewards[greedy])


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_advantages_are_the_rewards_to_come_less_that_of_the_greedy_response(
    folder: Path, beta: float, scale: float
) -> None:
    batch = of_two_prompts()
    batch = replace(batch, rewards=batch.rewards * scale)
    algorithm = remax(folder, klCoefficient=beta)
    prepared = algorithm.prepare(without_greedy(batch, 4))
    for place, (row, greedy) in enumerate([(0, 3), (1, 3), (2, 3), (4, 7), (5, 7), (6, 7)]):
        wanted, length = advantages_by_formula(batch, row, greedy, beta), int(batch.response_lengths[row])
        found = prepared.fields["advantages"][place]
        np.testing.assert_allclose(found[:length].numpy(), wanted, rtol=1e-5, atol=1e-6 * min(scale, 1.0))
        assert not found[length:].any()
    assert algorithm.batch_metrics(prepared)["baseline/mean"] == pytest.approx(
        float(batch.rewards[[3, 7]].double().mean()), rel=1e-6
    )


def test_with_the_divergence_in_the_loss_all_tokens_of_a_response_have_one_advantage(folder: Path) -> None:
    batch = of_two_prompts()
    prepared = remax(folder, klIn="Loss", klCoefficient=0.3).prepare(without_greedy(batch, 4))
    for place, (row, greedy) in enumerate([(0, 3), (1, 3), (2, 3), (4, 7), (5, 7), (6, 7)]):
        wanted = float(batch.rewards[row]) - float(batch.rewards[greedy])
        length = int(batch.response_lengths[row])
        np.testing.assert_allclose(prepared.fields["advantages"][place, :length].numpy(), wanted, rtol=1e-6)


def test_a_greedy_response_without_a_reward_masks_its_prompt_and_no_other(folder: Path) -> None:
    prepared = remax(folder, klCoefficient=0).prepare(without_greedy(of_two_prompts(3), 4))
    assert prepared.valid.tolist() == [False, False, False, True, True, True]
    assert not prepared.fields["advantages"][:3].any()
    assert not prepared.mask[:3].any()
    assert prepared.fields["advantages"][3:].any()
    metrics = remax(folder, klCoefficient=0).batch_metrics(prepared)
    assert metrics["reward/abstained"] == 3
    nothing = without_greedy(of_two_prompts(3, 7), 4)
    assert not nothing.mask.any()
    assert "baseline/mean" not in remax(folder, klCoefficient=0).batch_metrics(nothing)
