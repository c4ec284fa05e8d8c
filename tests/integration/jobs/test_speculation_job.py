"""A real deterministic job ends with the same bits regardless of its drafters and the length of drafts."""

import math
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

TOKENS = 48


def drafting(mode: str, folder: Path, manifest: Path, **others: object) -> Ended:
    fields = {"mode": mode, **others}
    options = [
        word for name, value in fields.items() for word in ("--set", f"spec.generation.speculation.{name}={value}")
    ]
    return run_job(manifest, folder, options=options)


def test_drafts_of_a_fixed_length_and_chosen_ones_change_no_bit(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=2, responses=TOKENS)
    runs = {
        "none": drafting("Disabled", tmp_path / "none", manifest),
        "fixed": drafting("Fixed", tmp_path / "fixed", manifest, maxTokens=3),
        "auto": drafting("Auto", tmp_path / "auto", manifest),
    }
    said = "\n".join(f"{name}: {run.output[-2000:]}" for name, run in runs.items())
    assert {run.code for run in runs.values()} == {0}, said
    assert len({run.weights for run in runs.values()}) == 1, said
    assert runs["none"].weights != ""
    drafted = {
        name: math.fsum(
            line.get("speculation/drafted", 0.0) for line in read_metrics(tmp_path / name / "metrics.jsonl")
        )
        for name in runs
    }
    assert drafted["none"] == 0, said
    assert drafted["fixed"] > 0, said
