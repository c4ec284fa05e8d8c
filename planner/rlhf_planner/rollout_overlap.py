"""Compares an iteration that decodes beside training with one that does not, from the times of its parts.

Rule: pure. Assumes that generation and training use distinct devices.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MEASURED: Final = 8
"""Maximum number of last iterations of which the medians count."""


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """Times of the parts of an iteration, in seconds."""

    rollout: float
    """Seconds of generation and of the scoring that remains after it."""
    training: float
    publishing: float


def unchanged(times: RolloutTimes) -> float:
    """Return the time of an iteration that decodes, then trains, then publishes."""
    return times.rollout + times.training + times.publishing


def overlapped(times: RolloutTimes) -> float:
    """Return the steady-state time of an iteration that decodes while the previous one is trained on."""
    return max(times.rollout, times.training) + times.publishing


def rollout_times(lines: Sequence[Mapping[str, Any]]) -> RolloutTimes | None:
    """Return the times of a run from the lines of its metrics.jsonl, with or without overlap.

    Returns None if no line has all times.
    """
    names = ("seconds/generation_and_inference", "training/train/seconds", "seconds/publish")
    found = []
    for line in lines:
        values = [line.get(name) for name in names]
        if all(isinstance(value, int | float) and value >= 0 for value in values):
            found.append(values)
    if not found:
        return None
    return RolloutTimes(*(float(statistics.median(column)) for column in zip(*found[-MEASURED:], strict=True)))
