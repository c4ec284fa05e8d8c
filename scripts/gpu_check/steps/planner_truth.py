"""The planner's predictions against what was measured on this device: decode, score, move, train, whole iteration.

A job with two generation workers, so that samples can move, and two training ranks, so that there is a schedule to
predict. Its costs are profiled on the device and then learned, as in any job; `fusion/simulated_...` are what the
planner makes of the lengths that came out, by the costs it knew before the iteration. The first iterations are left
out: they warm up, and the planner knows only its profile. The vocabulary is small, so that responses end by themselves
and have lengths that differ.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_check.local_jobs import LocalJobOutcome, manifest, run_job
from gpu_check.random_models import HALF_BILLION, TINY
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps.half_billion_job import PolicyJobSizes, make_files, spec_of

FEW_WORDS = replace(HALF_BILLION, vocabulary=TINY.vocabulary)
"""358 million parameters."""
WARM_UP = 2
"""Iterations left out."""
COMPARED = {
    "decode": ("fusion/simulated_decode_busy", "fusion/decode_busy"),
    "score": ("fusion/simulated_score_busy", "fusion/score_busy"),
    "generation and inference, planned": ("fusion/predicted_seconds", "seconds/generation_and_inference"),
    "generation and inference, lengths known": ("fusion/simulated_seconds", "seconds/generation_and_inference"),
    "training step": ("training/predicted_step_seconds", "training/step_seconds"),
}
"""What -> metrics of the predicted and the measured seconds."""
RATIOS = ("decode", "score", "transfer", "pause", "rebuild", "command")
"""Kinds of work for which a job reports observed over profiled seconds."""
MINI_BATCHES = 2
"""Of an iteration, as `spec_of` has it."""


@dataclass(frozen=True)
class TruthSizes:
    """Of the job, and how far a prediction may be off."""

    job: PolicyJobSizes
    tolerance: float
    """Share of the measured seconds; 0 checks nothing, for machines that other work shares."""


def run(machine: CheckedMachine, sizes: TruthSizes, report: Report) -> None:
    """Runs the job and compares."""
    make_files(machine, sizes.job, report)
    spec = truth_spec(machine, sizes.job)
    outcome = run_job(machine, report, manifest("planner-truth", spec), machine.scratch)
    rows = outcome.rows[WARM_UP:]
    report.check(
        "the job is complete",
        outcome.exit_code == 0 and len(outcome.rows) == sizes.job.iterations,
        f"exit code {outcome.exit_code}, {len(outcome.rows)} of {sizes.job.iterations} iterations",
    )
    for what, (predicted, measured) in COMPARED.items():
        compare(report, what, median(rows, predicted), median(rows, measured), sizes.tolerance)
    compare(report, "whole iteration", *whole(rows), sizes.tolerance)
    moves(report, outcome)


def truth_spec(machine: CheckedMachine, sizes: PolicyJobSizes) -> dict[str, Any]:
    """Return the job: half of the samples move to one worker with their caches, when that many are left."""
    spec = spec_of(machine, sizes)
    spec["generation"] |= {"replicas": 2, "maxBatchSize": sizes.batch}
    spec["training"] |= {"parallelism": {"pipeline": 2}}
    spec["fusion"] = {"interStage": {"mode": "Auto"}, "intraStage": {"mode": "Auto"}}
    return spec


def compare(report: Report, what: str, predicted: float | None, measured: float | None, tolerance: float) -> None:
    """Adds a row of the table, and the check that goes with it."""
    if predicted is None or measured is None or not measured:
        report.check(f"{what}: predicted and measured", False, f"predicted {predicted}, measured {measured}")
        return
    off = predicted / measured - 1
    report.row("seconds", what=what, predicted=predicted, measured=measured, off=f"{100 * off:+.0f}%")
    if tolerance:
        found = f"predicted {predicted:.4g} s, measured {measured:.4g} s"
        report.check(f"{what}: within {100 * tolerance:.0f}%", abs(off) <= tolerance, found)


def whole(rows: Iterable[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Return predicted and measured seconds of an iteration, without checkpoint and publishing."""
    pairs = [
        (
            row["fusion/simulated_seconds"] + MINI_BATCHES * row["training/predicted_step_seconds"],
            row["seconds/generation_and_inference"] + row["seconds/training"],
        )
        for row in rows
        if "fusion/simulated_seconds" in row and "training/predicted_step_seconds" in row
    ]
    if not pairs:
        return None, None
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def moves(report: Report, outcome: LocalJobOutcome) -> None:
    """Reports what moved, and observed over profiled costs."""
    moved = sum(row.get("fusion/moved_kv", 0) for row in outcome.rows)
    report.figure("samples moved with their caches", moved)
    if seconds := sum(row.get("fusion/migration_seconds", 0) for row in outcome.rows):
        sent = sum(row.get("fusion/moved_bytes", 0) for row in outcome.rows)
        report.figure("moved_mb_per_second", sent / seconds / 1e6, "MB/s a move, from order to answer")
    last = outcome.rows[-1] if outcome.rows else {}
    if moved and "fusion/transfer_ratio" in last:
        compare(report, "move of one sample", seconds / moved / last["fusion/transfer_ratio"], seconds / moved, 0)
    for kind in RATIOS:
        if f"fusion/{kind}_ratio" in last:
            report.row("observed over profiled costs", kind=kind, ratio=last[f"fusion/{kind}_ratio"])
    if "fusion/contention_ratio" in last:
        report.row(
            "observed over profiled costs", kind="decoding beside scoring", ratio=last["fusion/contention_ratio"]
        )


def median(rows: Iterable[Mapping[str, float]], metric: str) -> float | None:
    """Return the median of a metric; None where no iteration has it."""
    values = [row[metric] for row in rows if metric in row]
    return statistics.median(values) if values else None


STEP = CheckStep(
    "planner_truth",
    "what the planner predicts of decoding, scoring, moving, training and a whole iteration, against what is measured",
    run,
    small=TruthSizes(PolicyJobSizes(TINY, iterations=4, batch=16, response=24, micro_batch=2), tolerance=0.0),
    gpu=TruthSizes(PolicyJobSizes(FEW_WORDS, iterations=6, batch=64, response=256, micro_batch=8), tolerance=0.3),
    limit_seconds=150,
    gpu_gigabytes=60,
)
