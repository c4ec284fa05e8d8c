"""DAPO's shaping and advantages against independently computed numbers."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.algorithms import member
from tests.support.model_folders import models
from tests.support.training.training_ranks import make_batch, make_job

from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.losses.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "added"), [(1, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1)]
)
def test_the_penalty_is_that_of_the_paper(length: int, added: float) -> None:
    """L_max is 20480, of which the last 4096 are the buffer."""
    assert float(overlong_penalty(torch.tensor([length]), 20480, 0.2 * 20480, 1.0)) == pytest.approx(added)


def test_the_penalty_grows_with_the_length_and_is_bounded() -> None:
    added = overlong_penalty(torch.arange(0, 200), 100, 31.5, 2.5)
    assert (added.diff() <= 0).all()
    assert (float(added.min()), float(added.max())) == (-2.5, 0.0)
    assert not overlong_penalty(torch.arange(0, 200), 100, 31.5, 0.0).any()


@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_a_prompt_with_equal_rewards_has_advantages_by_the_penalty_alone(tmp_path: Path, penalty: float) -> None:
    """The setting whenRoundsUsedUp: Train trains on it. Without a penalty its responses are worth the same."""
    folder = models.write_policy(tmp_path / "model", "llama", seed=1)
    fields = member("dapo", overlongShare=1, overlongPenalty=penalty)
    algorithm = build_algorithm(make_job(folder, folder, algorithm=fields).spec, torch.device("cpu"))
    batch = make_batch()
    prepared = algorithm.prepare(replace(batch, rewards=torch.ones_like(batch.rewards)))
    advantages = prepared.fields["advantages"][:, 0]
    if not penalty:
        assert not prepared.fields["advantages"].any()
        return
    for group in range(2):
        rows = range(4 * group, 4 * group + 4)
        by_length = sorted(rows, key=lambda row: int(batch.response_lengths[row]))
        ordered = [float(advantages[row]) for row in by_length]
        assert ordered == sorted(ordered, reverse=True)
        assert ordered[0] > 0 > ordered[-1]


@pytest.mark.parametrize("abstained", [(), (2,), (0, 1, 2), tuple(range(8))])
def test_advantages_are_those_of_a_group_by_shaped_rewards(tmp_path: Path, abstained: tuple[int, ...]) -> None:
    folder = models.write_policy(tmp_path / "model", "llama", seed=1)
    spec = make_job(folder, folder, algorithm=member("dapo", overlongShare=1, overlongPenalty=3)).spec
    algorithm, batch = build_algorithm(spec, torch.device("cpu")), make_batch(abstained=abstained)
    prepared, longest = algorithm.prepare(batch), spec.rollout.max_response_tokens
    for group in range(2):
        rows = [row for row in range(4 * group, 4 * group + 4) if row not in abstained]
        shaped = [float(batch.rewards[row]) - 3 * min(1, int(batch.response_lengths[row]) / longest) for row in rows]
        assert algorithm.shaped_rewards(prepared)[rows].tolist() == pytest.approx(shaped), "what tables show"
        for row, reward in zip(rows, shaped, strict=True):
            alone = len(rows) < 2
            wanted = 0.0 if alone else (reward - statistics.fmean(shaped)) / (statistics.stdev(shaped) + 1e-6)
            advantages = prepared.fields["advantages"][row][batch.mask[row]]
            assert advantages.tolist() == pytest.approx([wanted] * len(advantages), abs=1e-4)
    assert not prepared.fields["advantages"][~batch.mask].any()
    assert ("reward/overlong_penalty" in algorithm.batch_metrics(prepared)) == (len(abstained) < 8)
