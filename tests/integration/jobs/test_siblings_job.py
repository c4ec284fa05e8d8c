"""A real job whose siblings on other workers provide drafts has the bits of one without drafts."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Ended, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

DRAFTED: dict[str, Any] = {"mode": "Fixed", "maxTokens": 4, "drafters": '["Siblings"]'}


def run(manifest: Path, folder: Path, speculation: dict[str, Any]) -> Ended:
    """Run two workers that decode two samples at a time, so that later samples of a prompt have siblings elsewhere."""
    values = {f"spec.generation.speculation.{name}": value for name, value in speculation.items()}
    values |= {
        "spec.generation.maxBatchSize": 2,
        "spec.rollout.temperature": 0.2,
        "spec.fusion.intraStage.mode": "Disabled",
        "spec.fusion.interStage.mode": "Disabled",
    }
    return run_job(
        manifest, folder, options=[word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    )


def iteration_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of every iteration, independent of the way of decoding."""
    names = ("iteration", "reward", "tokens", "response_tokens_max", "training/actor/loss")
    return [{name: line.get(name) for name in names} for line in read_metrics(folder / "metrics.jsonl")]


def total(folder: Path, name: str) -> float:
    return math.fsum(line.get(name, 0.0) for line in read_metrics(folder / "metrics.jsonl"))


def test_siblings_on_different_workers_give_drafts_to_each_other(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=2, responses=120)
    plain = run(manifest, tmp_path / "plain", {"mode": "Disabled"})
    drafted = run(manifest, tmp_path / "drafted", DRAFTED)
    assert plain.code == drafted.code == 0, plain.output[-2000:] + drafted.output[-2000:]
    assert plain.weights == drafted.weights
    assert iteration_results(tmp_path / "plain") == iteration_results(tmp_path / "drafted")
    assert total(tmp_path / "plain", "siblings/sent") == 0
    assert total(tmp_path / "drafted", "siblings/sent") > 0
    assert total(tmp_path / "drafted", "speculation/accepted") > 0
