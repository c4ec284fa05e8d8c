"""Evaluation during training, with simulated workers over real gRPC.

It changes no weight, its numbers are the same despite kills, and every due weight version has one.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.state import fleet

TIMES = {"seconds", "waited_seconds"}
EVALUATION = {"every": 2, "promptCount": 5, "samplesPerPrompt": 2, "temperature": 1.0, "passReward": 0.5}


def begin(jobs: StartedJobs, folder: Path, pace: Pace | None = None, **spec: Any) -> tuple[Coordinated, Crew]:
    settings: dict[str, Any] = {"algorithm": "grpo", "iterations": 3, "evaluation": EVALUATION, **spec}
    return jobs.begin(make_job(folder, **settings), folder, pace)


def read_summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def figures(run: JobRun | None) -> list[dict[str, float]]:
    assert run is not None
    results = run.state.evaluation.results
    return [{name: value for name, value in result.metrics.items() if name not in TIMES} for result in results]


async def test_versions_that_are_due_are_evaluated_and_the_last_one(jobs: StartedJobs, tmp_path: Path) -> None:
    coordinated, workers = begin(jobs, tmp_path)
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    found = figures(coordinated.run)
    assert [metrics["version"] for metrics in found] == [0, 2, 3]
    assert all(metrics["samples"] == 10 and 0 <= metrics["pass_at_1"] <= metrics["pass_at_2"] <= 1 for metrics in found)
    assert workers["training-0"].weights == expected_weights(coordinated.job), "what it is trained on is the same"
    best = (tmp_path / "checkpoints" / "best.json").read_text()
    assert any(f'"version": {version}' in best for version in (2, 3))


@pytest.mark.parametrize(("every", "versions"), [(1, [0, 1, 2, 3]), (2, [0, 2, 3]), (3, [0, 3])])
async def test_every_evaluation_is_in_the_metrics(
    jobs: StartedJobs, tmp_path: Path, every: int, versions: list[int]
) -> None:
    coordinated, workers = begin(jobs, tmp_path, evaluation={**EVALUATION, "every": every})
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    evaluated = [line for line in lines if "evaluation/version" in line]
    assert [line["evaluation/version"] for line in evaluated] == versions
    assert [line["iteration"] for line in evaluated] == versions
    assert [line["iteration"] for line in lines if "seconds/iteration" in line] == [0, 1, 2]
    assert coordinated.run is not None
    assert coordinated.run.last_metrics["evaluation/version"] == 3
    assert read_summary(tmp_path / "run")["iterations"] == 3


@pytest.mark.parametrize("placement", ["Dedicated", "Colocated"])
async def test_who_dies_changes_no_number(
    jobs: StartedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    spec: dict[str, Any] = {"placement": placement, "evaluation": {**EVALUATION, "every": 1}}
    undisturbed, workers = begin(jobs, tmp_path / "one", **spec)
    assert (await undisturbed.outcome()).phase == "Complete"
    await workers.end()
    wanted = figures(undisturbed.run)
    assert [metrics["version"] for metrics in wanted] == [0, 1, 2, 3]

    monkeypatch.setattr(fleet, "GRACE_SECONDS", 0.2)
    slow = replace(Pace(), tokens_per_tick=1, train_seconds=0.05)
    disturbed, workers = begin(jobs, tmp_path / "two", slow, **spec)
    await disturbed.until("Scoring", 1)
    workers["generation-1"].kill()
    await disturbed.until("Generating", 2)
    await disturbed.cancel()
    disturbed.start()
    assert (await disturbed.outcome()).phase == "Complete"
    await workers.end()
    again = {metrics["version"]: metrics for metrics in figures(disturbed.run)}
    assert {version: again[version] for version in again} == {
        metrics["version"]: metrics for metrics in wanted if metrics["version"] in again
    }
    assert {0.0, 2.0, 3.0} <= again.keys()
    assert workers["generation-0" if placement == "Colocated" else "training-0"].weights == expected_weights(
        disturbed.job
    )
