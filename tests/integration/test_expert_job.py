"""Real jobs of mixtures of experts: they end, a folder of theirs is one of the hub's, and a rank killed on the way
changes no weight."""

from pathlib import Path

import pytest
import transformers
from safetensors import safe_open
from tests.support.chaos import assert_killed_ranks_change_no_weight
from tests.support.local_job import write_job

SEEDS = {"mixtral": 23, "qwen3_moe": 24}
"""Of the moments of kills; printed with every kill when the test fails."""
SIZES = {"mixtral": {"pipeline": 2}, "qwen3_moe": {"pipeline": 1, "data": 2, "shard": 2}}
"""Of the two training ranks: stages, and models in parts."""


@pytest.mark.slow
@pytest.mark.timeout(900)
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


def names(folder: Path) -> set[str]:
    found = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found
