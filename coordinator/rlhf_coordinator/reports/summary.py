"""summary.json: a run in a dozen numbers. Pure, but for the one atomic write."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FILE: Final = "summary.json"
TENTH: Final = 10
"""reward_first and reward_last are means over this part of the iterations: single iterations are noisy."""


def summarise(lines: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the metric lines, overridden by what the coordinator knows itself.

    `lines` have `iteration`, `time_ns` and metrics by name; `reward` may be null (NaN) or absent.
    """
    rewards = [float(line["reward"]) for line in lines if _is_number(line.get("reward"))]
    part = max(1, len(rewards) // TENTH)
    speeds = [float(line["samples_per_second"]) for line in lines if _is_number(line.get("samples_per_second"))]
    summary: dict[str, Any] = {
        "iterations": len(lines),
        "reward_first": _mean(rewards[:part]),
        "reward_last": _mean(rewards[-part:]),
        # Iterations have equal numbers of samples, so the mean over time is the harmonic mean.
        "samples_per_second": len(speeds) / sum(1 / speed for speed in speeds) if speeds and min(speeds) > 0 else None,
        "seconds": (lines[-1]["time_ns"] - lines[0]["time_ns"]) / 1e9 if lines else 0.0,
    }
    return {**summary, **{name: value for name, value in given.items() if value is not None}}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Atomically. Raises OSError."""
    partial = folder / f".{FILE}.tmp"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
