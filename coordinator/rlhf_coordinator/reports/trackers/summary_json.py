"""summary.json: the numbers of a run, written when its job ends.

Values that the coordinator knows override those of the metric lines.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_numbers import finite_number
from rlhf_coordinator.reports.trackers.metrics_jsonl import FILE as METRICS_FILE
from rlhf_coordinator.reports.trackers.metrics_jsonl import is_evaluation, read_metrics
from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "summary.json"
TENTH: Final = 10
"""Divisor for reward_first and reward_last, which are means over a tenth of the iterations with a reward."""


class SummaryJson(Tracker):
    """Writes the summary of metrics.jsonl at the end of the run."""

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        """Open nothing before the end."""
        self._run_dir = run_dir

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the file. Raises OSError."""
        write_summary(self._run_dir, summarise(read_metrics(self._run_dir / METRICS_FILE), summary))


def summarise(lines: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the metric lines, overridden by `overrides` that are not None."""
    lines = [line for line in lines if not is_evaluation(line)]
    rewards = [reward for line in lines if (reward := finite_number(line.get("reward"))) is not None]
    part = max(1, len(rewards) // TENTH)
    speeds = [speed for line in lines if (speed := finite_number(line.get("samples_per_second"))) is not None]
    summary: dict[str, Any] = {
        "iterations": len(lines),
        "reward_first": _mean(rewards[:part]),
        "reward_last": _mean(rewards[-part:]),
        # The harmonic mean is the mean over time of iterations with equal numbers of samples.
        "samples_per_second": len(speeds) / sum(1 / speed for speed in speeds) if speeds and min(speeds) > 0 else None,
        "seconds": (lines[-1]["time_ns"] - lines[0]["time_ns"]) / 1e9 if lines else 0.0,
    }
    return {**summary, **{name: value for name, value in overrides.items() if value is not None}}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json atomically. Raises OSError."""
    partial = folder / f".{FILE}.tmp"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
