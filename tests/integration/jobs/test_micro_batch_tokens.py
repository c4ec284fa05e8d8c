"""Micro-batches with a token limit in real jobs: killed ranks change no weight, nor does a limit above all lengths."""

import json
from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight, run_job
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

SEED = 22
"""Seed of the moments of kills; printed with every kill when the test fails."""
TOKENS = "spec.training.microBatchTokens"


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of every iteration of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_pipelines_whose_ranks_are_killed_end_in_the_same_weights(tmp_path: Path) -> None:
    """Use two stages, so that hidden states of different shapes pass between them, and a limit that most mini-batches
    reach.
    """
    manifest = write_job(tmp_path, iterations=4, every=2)
    options = ["--set", "spec.training.parallelism.pipeline=2", "--set", f"{TOKENS}=40"]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEED)
    iterations = metrics_of(tmp_path / "undisturbed")
    assert {line["training/train/largest_micro_batch_tokens"] <= 40 for line in iterations} == {True}


@pytest.mark.timeout(900)
def test_a_bound_above_all_lengths_is_none(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=2, every=2)
    ended = [
        run_job(manifest, tmp_path / name, options=["--set", "spec.fusion.intraStage.mode=Disabled", *bound])
        for name, bound in (("without", []), ("bounded", ["--set", f"{TOKENS}=1000000"]))
    ]
    assert [run.code for run in ended] == [0, 0], ended[-1].output[-4000:]
    assert ended[0].weights == ended[1].weights != ""
