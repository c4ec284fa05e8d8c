"""A job with vLLM engines draws the tokens of the torch engine, despite a kill, an interrupt, and training beside them.

The learning rate is too small to move a logit of float32, so that every iteration decodes with the same numbers and
only the engines can make a difference.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import HELD, write_job
from tests.support.model_folders.models import write_policy

from rlhf_common.names import ExitCode
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = pytest.mark.timeout(1800)

VICTIM = "generation-1"
ITERATIONS = 3
BATCH = 32
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
"""Heads of size 32: vLLM's kernels for CPU accept no smaller ones."""
TOGETHER = [
    word
    for change in ("placement=Colocated", "inference.replicas=0", "fusion.intraStage.mode=Disabled")
    for word in ("--set", f"spec.{change}")
]
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
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["deterministic"] = False
    job["spec"]["generation"]["engine"] = engine
    job["spec"]["training"]["optimizer"]["learningRate"] = 1e-11
    manifest.write_text(yaml.safe_dump(job))
    return manifest


def scored(folder: Path) -> set[tuple[str, str]]:
    """Return prompts with their scored responses; one that was scored twice counts once."""
    return {tuple(json.loads(line)) for line in (folder / "scored.jsonl").read_text().splitlines()}


def tokens(run_dir: Path) -> list[float]:
    """Return the number of tokens of each iteration."""
    return [line["tokens"] for line in read_metrics(run_dir / "metrics.jsonl")]


def said(ended: Ended) -> str:
    return f"kills {ended.kills}\n{ended.output[-4000:]}"


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the undisturbed job, decoded by the torch engine."""
    folder = tmp_path_factory.mktemp("torch")
    undisturbed = run_job(write(folder, "torch"), folder / "run")
    assert undisturbed.code == 0, said(undisturbed)
    assert len(scored(folder)) > ITERATIONS * BATCH // 2
    return folder


def is_the_same(folder: Path, other: Path) -> bool:
    return tokens(folder / "run") == tokens(other / "run") and scored(folder) == scored(other)


def test_a_killed_vllm_worker_loses_nothing_and_every_token_is_the_torch_engines(
    by_torch: Path, tmp_path: Path
) -> None:
    kills = Kills(0, 1, [VICTIM], in_phases=("Generating",), iterations_between=1)
    killed = run_job(write(tmp_path, "vllm"), tmp_path / "run", kills=kills)
    assert (killed.code, len(killed.kills)) == (0, 1), said(killed)
    assert is_the_same(tmp_path, by_torch)


@pytest.mark.full
def test_vllm_workers_that_train_too_go_on_where_they_were_interrupted(by_torch: Path, tmp_path: Path) -> None:
    manifest, run_dir = write(tmp_path, "vllm"), tmp_path / "run"
    interrupted = run_job(manifest, run_dir, options=TOGETHER, interrupt_after=1)
    assert interrupted.code == ExitCode.INTERRUPTED, said(interrupted)
    assert 1 <= len(tokens(run_dir)) < ITERATIONS
    resumed = run_job(manifest, run_dir, options=[*TOGETHER, "--resume"])
    assert resumed.code == 0, said(resumed)
    assert is_the_same(tmp_path, by_torch)
    logs = {path.stem for path in (run_dir / "logs").glob("*.log")}
    assert logs - {"fork-server"} == {"coordinator", "generation-0", "generation-1"}
    timeline = (run_dir / "timeline.json").read_text()
    for span in ("offload/generation", "onload/training", "offload/training", "onload/generation"):
        assert f'"name":"{span}"' in timeline
