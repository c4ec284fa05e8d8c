"""Real jobs with mixtures of experts: vLLM decodes with the weights that the ranks publish."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_vllm_follows_the_weights_that_two_ranks_train(family: str, tmp_path: Path) -> None:
    manifest = write_job(
        tmp_path, engine="vllm", family=family, algorithm="grpo", iterations=3, responses=12, learning_rate=1e-2
    )
    lines = run_job(manifest, tmp_path / "run").lines
    assert len(lines) == 3
    for line in lines:
        assert line["training/gradient_norm/actor"] > 0
        assert line["training/train/expert_load/actor"] >= 1
        assert 0 <= line["training/train/experts_unused/actor"] < 1
        assert line["training/actor/mismatch_max"] < 1e-4, "the ranks see the log-probabilities that vLLM drew by"
