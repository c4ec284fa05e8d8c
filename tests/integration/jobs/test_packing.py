"""Packed micro-batches in real jobs.

Killed ranks change no weight, the reward rises as with padding, and the comparison runs as documented.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SEED = 27
"""Seed of the moments of kills; printed with every kill when the test fails."""
PACKED = ("--set", "spec.training.packing=true")
ITERATIONS = 24


def test_pipelines_whose_ranks_are_killed_end_in_the_same_weights(tmp_path: Path) -> None:
    """Use two stages, so that rows of different lengths pass between them, and more micro-batches if needed."""
    manifest = write_job(tmp_path, iterations=4, every=2)
    bound = ("--set", "spec.training.microBatchTokens=80", "--set", "spec.algorithm.ppo.oldLogProbabilities=Trainer")
    assert_killed_ranks_change_no_weight(manifest, tmp_path, [*PACKED, *bound], SEED)
    lines = list(read_metrics(tmp_path / "undisturbed" / "metrics.jsonl"))
    assert {line["training/train/padding"] for line in lines} == {0.0}
    assert all(line["training/train/largest_micro_batch_tokens"] <= 80 for line in lines)


def test_the_reward_rises_as_it_does_with_padding(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, responses=48, learning_rate=4e-3)
    lines = {}
    for name, options in (("packed", PACKED), ("padded", ())):
        ended = run_job(manifest, tmp_path / name, options=options)
        assert ended.code == 0, ended.output[-3000:]
        lines[name] = list(read_metrics(tmp_path / name / "metrics.jsonl"))
    packed, padded = lines["packed"], lines["padded"]
    assert {line["training/train/padding"] for line in packed} == {0.0}
    assert all(line["training/train/padding"] > 0 for line in padded)
    # The policies sample and train equally until rounding makes them differ.
    assert packed[0]["reward"] == padded[0]["reward"]
    norms = [line[0]["training/gradient_norm/actor"] for line in (packed, padded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    rises = {
        name: sum(line["reward"] for line in of[-4:]) / 4 - sum(line["reward"] for line in of[:4]) / 4
        for name, of in lines.items()
    }
    assert min(rises.values()) > 0.05, rises
