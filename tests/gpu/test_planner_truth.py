"""The planner's predictions against measurements on this device: decode, score, move, train, whole iteration.

The job has two generation workers, so that samples can move, and two training ranks, so that there is a schedule to
predict. Its costs are profiled on the device and then learned, as in any job. `fusion/simulated_...` are the planner's
results for the actual lengths with the costs it knew before the iteration. The first iterations are omitted: they warm
up, and the planner knows only its profile. The vocabulary is small, so that responses end by themselves and have
different lengths.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest
from tests.gpu.local_jobs import LocalJobOutcome, PolicyJobSizes, median, run_job, write_files
from tests.gpu.models import FEW_WORDS, TINY

from gpu_check.plugin import CheckedMachine, Figures

SMALL = PolicyJobSizes(TINY, iterations=4, batch=16, response=24, micro_batch=2)
LARGE = PolicyJobSizes(FEW_WORDS, iterations=6, batch=64, response=256, micro_batch=8)
TOLERANCE: Final = 0.3
"""Relative error allowed for a prediction on a GPU; a CPU is shared with other work."""
WARM_UP: Final = 2
"""Number of omitted iterations."""
COMPARED: Final = {
    "decode": ("fusion/simulated_decode_busy", "fusion/decode_busy"),
    "score": ("fusion/simulated_score_busy", "fusion/score_busy"),
    "generation and inference, planned": ("fusion/predicted_seconds", "seconds/generation_and_inference"),
    "generation and inference, lengths known": ("fusion/simulated_seconds", "seconds/generation_and_inference"),
    "training step": ("training/predicted_step_seconds", "training/step_seconds"),
}
"""Name -> metrics of the predicted and the measured seconds."""
RATIOS: Final = {
    **{kind: kind for kind in ("decode", "score", "transfer", "pause", "rebuild", "command")},
    "contention": "decoding beside scoring",
}
"""Kinds of work for which a job reports observed over profiled seconds -> their names here."""
MINI_BATCHES: Final = 2
"""Mini-batches of an iteration of the job."""


@pytest.mark.gpu(seconds=150, gigabytes=60)
def test_planner_truth(machine: CheckedMachine, figures: Figures) -> None:
    """The planner's predictions of decoding, scoring, moving, training and a whole iteration, against measurements."""
    sizes, tolerance = machine.sized(SMALL, LARGE), machine.sized(0.0, TOLERANCE)
    spec = truth_spec(write_files(machine, sizes, figures))
    outcome = run_job(machine, figures, "planner-truth", spec)
    rows = outcome.rows[WARM_UP:]
    figures.check(
        "the job is complete",
        outcome.exit_code == 0 and len(outcome.rows) == sizes.iterations,
        f"exit code {outcome.exit_code}, {len(outcome.rows)} of {sizes.iterations} iterations",
    )
    for name, (predicted, measured) in COMPARED.items():
        compare(figures, name, median(rows, predicted), median(rows, measured), tolerance)
    compare(figures, "whole iteration", *whole(rows), tolerance)
    moves(figures, outcome)


def truth_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the job with two generation workers, two training ranks and automatic fusion."""
    spec["generation"]["replicas"] = 2
    spec["training"]["parallelism"] = {"pipeline": 2}
    spec["fusion"] = {"interStage": {"mode": "Auto"}, "intraStage": {"mode": "Auto"}}
    return spec


def compare(figures: Figures, name: str, predicted: float | None, measured: float | None, tolerance: float) -> None:
    """Add a row of the table, and with a tolerance its check."""
    if predicted is None or measured is None or not measured:
        figures.check(f"{name}: predicted and measured", False, f"predicted {predicted}, measured {measured}")
        return
    off = predicted / measured - 1
    figures.row("seconds", what=name, predicted=predicted, measured=measured, off=f"{100 * off:+.0f}%")
    if tolerance:
        found = f"predicted {predicted:.4g} s, measured {measured:.4g} s"
        figures.check(f"{name}: within {100 * tolerance:.0f}%", abs(off) <= tolerance, found)


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


def moves(figures: Figures, outcome: LocalJobOutcome) -> None:
    """Record the moves, and observed over profiled costs."""
    moved = sum(row.get("fusion/moved_kv", 0) for row in outcome.rows)
    figures.add("samples moved with their caches", moved)
    if seconds := sum(row.get("fusion/migration_seconds", 0) for row in outcome.rows):
        sent = sum(row.get("fusion/moved_bytes", 0) for row in outcome.rows)
        figures.add("moved_mb_per_second", sent / seconds / 1e6, "MB/s a move, from order to answer")
    last = outcome.rows[-1] if outcome.rows else {}
    if moved and "fusion/transfer_ratio" in last:
        compare(figures, "move of one sample", seconds / moved / last["fusion/transfer_ratio"], seconds / moved, 0)
    for metric, kind in RATIOS.items():
        if f"fusion/{metric}_ratio" in last:
            figures.row("observed over profiled costs", kind=kind, ratio=last[f"fusion/{metric}_ratio"])
