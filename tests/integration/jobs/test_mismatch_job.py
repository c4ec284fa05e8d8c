"""Trainer and engine that differ, in real local runs: the mismatch is detected and corrected.

It is bfloat16 beside float32, or the last bits of float32; in the latter a killed rank changes nothing.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 6
SEED = 7
"""Seed of the moment of the kill."""
CORRECTED = (
    "training.precision=Float32",
    "algorithm.grpo.oldLogProbabilities=Trainer",
    "algorithm.grpo.mismatchCorrection.mode=Truncate",
)
PARTS = ("", "_max", "_kl", "_corrected", "_weight")


def mismatches(run: Ended) -> list[dict[str, float]]:
    """Return the reported mismatch of each iteration."""
    assert len(run.lines) == ITERATIONS
    return [{part: line[f"training/actor/mismatch{part}"] for part in PARTS} for line in run.lines]


def test_a_coarser_engine_is_corrected(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, every=2)
    coarser = (
        *CORRECTED,
        "deterministic=false",
        "generation.engineArgs.dtype=bfloat16",
        "algorithm.grpo.mismatchCorrection.high=1.005",
    )
    for mismatch in mismatches(run_job(manifest, tmp_path / "run", settings=coarser)):
        assert 1e-4 < mismatch[""] < mismatch["_max"], mismatch
        assert 0 < mismatch["_kl"] < 0.1, mismatch
        assert 0 < mismatch["_corrected"] < 1, mismatch
        assert 0.5 < mismatch["_weight"] < 1.005, mismatch


def test_a_killed_rank_changes_no_bit_of_what_is_corrected(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, every=2)
    last_bits = (*CORRECTED, "algorithm.grpo.mismatchCorrection.high=1.0000002")
    calm = run_job(manifest, tmp_path / "calm", settings=last_bits)
    assert any(mismatch["_corrected"] > 0 for mismatch in mismatches(calm))
    kills = Kills(SEED, 1, ["training-1"], in_phases=("Training",), iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", settings=last_bits, kills=kills)
    assert_same_weights(killed, calm)
