"""Metrics of a batch match its samples; metrics that cannot be computed are left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.training.training_ranks import make_batch

from rlhf_api.algorithms import full_graph
from rlhf_workers.algorithms.batch_metrics import batch_metrics

GRAPH = full_graph("ppo")


def test_rewards_lengths_and_advantages_are_those_of_the_samples() -> None:
    batch = replace(make_batch(abstained=(2,)), finished=torch.tensor([True, False] * 4))
    batch = batch.with_fields(advantages=torch.randn(batch.mask.shape) * batch.mask)
    got = batch_metrics(batch, GRAPH)
    rewards = np.delete(batch.rewards.numpy(), 2)
    advantages, lengths = batch.fields["advantages"][batch.mask].numpy(), batch.response_lengths.numpy()
    prompts = np.array([len(prompt) for prompt in batch.prompts])
    expected = {
        "reward/abstained": 1,
        **{f"reward/{name}": getattr(rewards, name)() for name in ("mean", "std", "min", "max")},
        **{f"advantages/{name}": getattr(advantages, name)() for name in ("mean", "std", "min", "max")},
        **{f"response_length/{name}": getattr(lengths, name)() for name in ("mean", "min", "max")},
        **{f"response_length/terminated_{name}": getattr(lengths[::2], name)() for name in ("mean", "min", "max")},
        **{f"prompt_length/{name}": getattr(prompts, name)() for name in ("mean", "min", "max")},
        "response_length/truncated_share": 0.5,
        "groups/zero_variance_share": 0,
    }
    # A mean of numbers of both signs is as exact as they are large: its own size says nothing.
    close = {name: pytest.approx(float(value), rel=1e-5, abs=1e-6) for name, value in expected.items()}
    assert got == {**got, **close}
    assert got.keys() - expected.keys() == {"actor/kl", "actor/kl_per_token"}


@pytest.mark.parametrize(
    ("rewards", "valid", "share"),
    [
        ([1, 1, 1, 1, 2, 2, 2, 2], [True] * 8, 1.0),
        ([1, 1, 1, 0, 2, 2, 2, 2], [True] * 8, 0.5),
        ([1, 1, 1, 0, 2, 2, 2, 2], [True] * 3 + [False] + [True] * 4, 1.0),  # who differed abstained
        ([1, 2, 1, 0, 2, 2, 2, 2], [True] * 4 + [True] + [False] * 3, 0.0),  # of the second, one alone is judged
    ],
)
def test_groups_of_equal_rewards_are_counted(rewards: list[float], valid: list[bool], share: float) -> None:
    batch = replace(make_batch(), rewards=torch.tensor(rewards, dtype=torch.float32), valid=torch.tensor(valid))
    assert batch_metrics(batch, GRAPH)["groups/zero_variance_share"] == share


def test_what_there_is_nothing_of_is_not_shown() -> None:
    batch = make_batch(abstained=range(8))
    alone = replace(make_batch(), groups=torch.arange(8), finished=torch.zeros(8, dtype=torch.bool))
    assert not {"reward/mean", "groups/zero_variance_share", "advantages/mean"} & batch_metrics(batch, GRAPH).keys()
    shown = batch_metrics(alone, GRAPH)
    assert not {"groups/zero_variance_share", "response_length/terminated_mean"} & shown.keys()
    assert shown["response_length/truncated_share"] == 1
