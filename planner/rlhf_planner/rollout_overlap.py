"""What decoding beside training would gain: an iteration with and without it, by the times of its parts.

Owns the comparison and decides nothing: `spec.rollout.overlapTraining` does.
Rule: pure. Devices of generation and of training must be distinct: what shares cores or a GPU gains less.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MEASURED: Final = 8
"""Last iterations whose medians count."""


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """What the parts of an iteration take, in seconds."""

    rollout: float
    """Generation, and what is left to score after it."""
    training: float
    publishing: float


def unchanged(times: RolloutTimes) -> float:
    """Return the time of an iteration that decodes, then trains, then publishes."""
    return times.rollout + times.training + times.publishing


def overlapped(times: RolloutTimes) -> float:
    """Return the time of an iteration that decodes while the one before is trained on, in a steady state."""
    return max(times.rollout, times.training) + times.publishing


def rollout_times(lines: Sequence[Mapping[str, Any]]) -> RolloutTimes | None:
    """Return the times of a run from the lines of its metrics.jsonl, of either way; None when no line has them all."""
    names = ("seconds/generation_and_inference", "training/train/seconds", "seconds/publish")
    found = []
    for line in lines:
        values = [line.get(name) for name in names]
        if all(isinstance(value, int | float) and value >= 0 for value in values):
            found.append(values)
    if not found:
        return None
    return RolloutTimes(*(float(statistics.median(column)) for column in zip(*found[-MEASURED:], strict=True)))
