"""A job with vLLM engines draws the tokens of the torch engine, despite a kill, an interrupt, and training beside them.

The learning rate is too small to move a logit of float32, so that every iteration decodes with the same numbers and
only the engines can make a difference.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Kills, lines, run_job
from tests.support.jobs.local_job import HELD, edited_spec, write_job
from tests.support.model_folders.models import write_policy

from rlhf_common.names import ExitCode

pytestmark = pytest.mark.timeout(1800)

VICTIM = "generation-1"
ITERATIONS = 3
BATCH = 32
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
"""Heads of size 32: vLLM's kernels for CPU accept no smaller ones."""
TOGETHER = ("placement=Colocated", "inference.replicas=0", "fusion.intraStage.mode=Disabled")
REWARD = f'''{HELD}\
import json
from pathlib import Path


@held
def score(prompt, response, record):
    """Share of characters that are digits; what was scored is kept for the test."""
    with Path(__file__).with_name("scored.jsonl").open("a") as file:
        file.write(json.dumps([prompt, response]) + "\\n")
    return sum(character.isdigit() for character in response) / max(1, len(response))
'''


def write(folder: Path, engine: str) -> Path:
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=64)
    write_policy(folder / "policy", **HEADS)
    (folder / "reward.py").write_text(REWARD)
    with edited_spec(manifest) as spec:
        spec["deterministic"] = False
        spec["generation"]["engine"] = engine
        spec["training"]["optimizer"]["learningRate"] = 1e-11
    return manifest


def scored(folder: Path) -> set[tuple[str, str]]:
    """Return prompts with their scored responses; one that was scored twice counts once."""
    return {tuple(json.loads(line)) for line in (folder / "scored.jsonl").read_text().splitlines()}


def tokens(run_dir: Path) -> list[float]:
    """Return the number of tokens of each iteration."""
    return [line["tokens"] for line in lines(run_dir)]


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the undisturbed job, decoded by the torch engine."""
    folder = tmp_path_factory.mktemp("torch")
    run_job(write(folder, "torch"), folder / "run")
    assert len(scored(folder)) > ITERATIONS * BATCH // 2
    return folder


def is_the_same(folder: Path, other: Path) -> bool:
    return tokens(folder / "run") == tokens(other / "run") and scored(folder) == scored(other)


def test_a_killed_vllm_worker_loses_nothing_and_every_token_is_the_torch_engines(
    by_torch: Path, tmp_path: Path
) -> None:
    kills = Kills(0, 1, [VICTIM], in_phases=("Generating",), iterations_between=1)
    run_job(write(tmp_path, "vllm"), tmp_path / "run", kills=kills)
    assert is_the_same(tmp_path, by_torch)


@pytest.mark.full
def test_vllm_workers_that_train_too_go_on_where_they_were_interrupted(by_torch: Path, tmp_path: Path) -> None:
    manifest, run_dir = write(tmp_path, "vllm"), tmp_path / "run"
    run_job(manifest, run_dir, settings=TOGETHER, interrupt_after=1, code=ExitCode.INTERRUPTED)
    assert 1 <= len(tokens(run_dir)) < ITERATIONS
    run_job(manifest, run_dir, settings=TOGETHER, options=["--resume"])
    assert is_the_same(tmp_path, by_torch)
    logs = {path.stem for path in (run_dir / "logs").glob("*.log")}
    assert logs - {"fork-server"} == {"coordinator", "generation-0", "generation-1"}
    timeline = (run_dir / "timeline.json").read_text()
    for span in ("offload/generation", "onload/training", "offload/training", "onload/generation"):
        assert f'"name":"{span}"' in timeline
