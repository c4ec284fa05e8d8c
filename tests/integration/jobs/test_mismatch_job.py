"""Trainer and engine that differ, in real local runs: the mismatch is detected and corrected.

It is bfloat16 beside float32, or the last bits of float32; in the latter a killed rank changes nothing.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 6
SEED = 7
"""Seed of the moment of the kill."""
CORRECTED = (
    "spec.training.precision=Float32",
    "spec.algorithm.grpo.oldLogProbabilities=Trainer",
    "spec.algorithm.grpo.mismatchCorrection.mode=Truncate",
)
PARTS = ("", "_max", "_kl", "_corrected", "_weight")


def mismatches(run: Path) -> list[dict[str, float]]:
    """Return the reported mismatch of each iteration."""
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert len(lines) == ITERATIONS
    return [{part: line[f"training/actor/mismatch{part}"] for part in PARTS} for line in lines]


def settings(*fields: str) -> list[str]:
    return [part for field in (*CORRECTED, *fields) for part in ("--set", field)]


def test_a_coarser_engine_is_corrected(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, every=2)
    coarser = settings(
        "spec.deterministic=false",
        "spec.generation.engineArgs.dtype=bfloat16",
        "spec.algorithm.grpo.mismatchCorrection.high=1.005",
    )
    ended = run_job(manifest, tmp_path / "run", options=coarser)
    assert ended.code == 0, ended.output[-3000:]
    for mismatch in mismatches(tmp_path / "run"):
        assert 1e-4 < mismatch[""] < mismatch["_max"], mismatch
        assert 0 < mismatch["_kl"] < 0.1, mismatch
        assert 0 < mismatch["_corrected"] < 1, mismatch
        assert 0.5 < mismatch["_weight"] < 1.005, mismatch


def test_a_killed_rank_changes_no_bit_of_what_is_corrected(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, every=2)
    last_bits = settings("spec.algorithm.grpo.mismatchCorrection.high=1.0000002")
    calm = run_job(manifest, tmp_path / "calm", options=last_bits)
    assert calm.code == 0, calm.output[-3000:]
    assert any(mismatch["_corrected"] > 0 for mismatch in mismatches(tmp_path / "calm"))
    kills = Kills(SEED, 1, ["training-1"], in_phases=("Training",), iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", options=last_bits, kills=kills)
    assert (killed.code, len(killed.kills)) == (0, 1), f"{killed.kills}\n{killed.output[-3000:]}"
    assert killed.weights == calm.weights != "", killed.kills
