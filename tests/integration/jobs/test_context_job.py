"""A real job whose ranks share each sample by position trains like a rank with whole samples, despite a killed rank."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

SEED = 27
"""Seed of the moments of kills; printed with every kill when the test fails."""
CUT = ["--set", "spec.training.parallelism={pipeline: 1, data: 1, context: 2}", "--set", "spec.training.packing=true"]
WHOLE = ["--set", "spec.training.parallelism={pipeline: 1, data: 1}", "--set", "spec.training.packing=true"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1, responses=12)
    assert_killed_ranks_change_no_weight(manifest, tmp_path, CUT, SEED)
    whole = run_job(manifest, tmp_path / "whole", options=WHOLE)
    assert whole.code == 0, whole.output[-3000:]
    ours, theirs = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("undisturbed", "whole"))
    assert len(ours) == len(theirs) == 3
    for name in ("training/gradient_norm/actor", "training/actor/loss", "training/actor/entropy"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-3, abs=1e-5), "they begin with the same samples"
