"""Fits the cost of a decode step, and each worker's pace, to the recorded steps.

A step takes `step + row * rows + key * rows * keys` seconds, times the worker's pace.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_planner.explain.iteration_profile import StepFacts
from rlhf_planner.inter_stage.fitted_costs import non_negative

MIN_STEPS: Final = 8
"""Minimum steps of a record that is used in a fit."""


@dataclass(frozen=True)
class DecodeCosts:
    """Cost of a decode step of one token per sample, on a worker of pace 1, in seconds."""

    step: float
    row: float
    key: float
    paces: dict[str, float]
    """Worker -> pace: the factor by which its steps take longer, from 1/10 to 100."""
    largest: float
    """Mean rows per step of the record with the largest batches, among the records that were used."""

    def seconds(self, rows: float, keys: float) -> float:
        """Return the seconds of a step of `rows` samples with `keys` keys each."""
        return self.step + rows * (self.row + self.key * keys)


def decode_costs(steps: Sequence[StepFacts]) -> DecodeCosts | None:
    """Return the costs fitted to the steps; None if no record can be used."""
    enough = [row for row in steps if row.steps >= MIN_STEPS and row.seconds > 0 and row.rows > 0]
    usable = [row for row in enough if not row.verified] or enough
    if not usable:
        return None
    paces = worker_paces(usable)
    features = np.array([[1.0, row.rows, row.rows * row.keys] for row in usable])
    seconds = np.array([_token_seconds(row) / paces[row.worker] for row in usable])
    step, a_row, a_key = non_negative(features, seconds, np.array([row.steps for row in usable]))
    return DecodeCosts(step, a_row, a_key, paces, max(row.rows for row in usable))


def worker_paces(steps: Sequence[StepFacts]) -> dict[str, float]:
    """Return each worker's step time relative to the (lower) median worker, for steps of similar batch size.

    A worker without a comparison has 1.
    """
    by_size: dict[int, list[StepFacts]] = {}
    for row in steps:
        by_size.setdefault(round(math.log2(max(1.0, row.rows))), []).append(row)
    sums: dict[str, list[float]] = {}
    for rows in by_size.values():
        own: dict[str, list[StepFacts]] = {}
        for row in rows:
            own.setdefault(row.worker, []).append(row)
        per_step = {
            name: sum(row.seconds / max(row.tokens, 1.0) for row in rows) / sum(row.steps for row in rows)
            for name, rows in own.items()
        }
        middle = statistics.median_low(sorted(per_step.values()))
        if len(own) < 2 or middle <= 0:
            continue
        for name, seconds in per_step.items():
            weight = sum(row.steps for row in own[name])
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += weight * math.log(min(100.0, max(0.1, seconds / middle)))
            total[1] += weight
    return {row.worker: 1.0 for row in steps} | {name: math.exp(log / weight) for name, (log, weight) in sums.items()}


def _token_seconds(row: StepFacts) -> float:
    """Return the seconds for one token of every sample."""
    return row.seconds / row.steps / max(row.tokens, 1.0)
