"""Real jobs with mixtures of experts.

They complete, their folders have the hub's format, a killed rank changes no weight, and vLLM decodes with the weights
that the ranks publish.
"""

from pathlib import Path

import pytest
import transformers
from safetensors import safe_open
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

SEEDS = {"mixtral": 23, "qwen3_moe": 24}
"""Seeds of the moments of kills; printed with every kill when the test fails."""
SIZES = {"mixtral": {"pipeline": 1, "data": 2, "expert": 2}, "qwen3_moe": {"pipeline": 1, "data": 2, "shard": 2}}
"""Layouts of the two training ranks: divided experts, and sharded models."""


pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize("family", list(SIZES))
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(family: str, tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1, responses=12, family=family)
    options = [
        part for name, size in SIZES[family].items() for part in ("--set", f"spec.training.parallelism.{name}={size}")
    ]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEEDS[family])
    saved = max((tmp_path / "killed" / "checkpoints").glob("iteration-*")) / "actor"
    assert names(saved) == names(tmp_path / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    began = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    still = [name for name, value in model.named_parameters() if value.equal(began[name])]
    assert still == [], "routers and experts are trained"


@pytest.mark.parametrize("family", list(SIZES))
def test_vllm_follows_the_weights_that_two_ranks_train(family: str, tmp_path: Path) -> None:
    manifest = write_job(
        tmp_path, engine="vllm", family=family, algorithm="grpo", iterations=3, responses=12, learning_rate=1e-2
    )
    ended = run_job(manifest, tmp_path / "run")
    assert ended.code == 0, ended.output[-3000:]
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert len(lines) == 3
    for line in lines:
        assert line["training/gradient_norm/actor"] > 0
        assert line["training/train/expert_load/actor"] >= 1
        assert 0 <= line["training/train/experts_unused/actor"] < 1
        assert line["training/actor/mismatch_max"] < 1e-4, "the ranks see the log-probabilities that vLLM drew by"


def names(folder: Path) -> set[str]:
    found = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found
