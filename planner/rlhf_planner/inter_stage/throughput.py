"""Throughput of a worker over its samples, in tokens per second, from learned costs, drafts and the worker's pace.

A pace is the factor by which the same work takes longer on that worker. Must never read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.observed_steps import MAX_RATIO, MIN_RATIO

PRIOR: Final = 4.0
"""Intervals of work at pace 1 that every worker starts with."""
MEMORY: Final = 0.95
"""Weight of earlier observations after each interval."""


class PaceAt(NamedTuple):
    """Observations at one batch size, a power of two."""

    octave: int
    weight: float
    """Damped number of intervals of work."""
    total: float
    """Damped sum of log(time relative to all workers)."""


@dataclass(frozen=True)
class WorkerPace:
    """Time for the same work relative to all workers, by batch size."""

    seen: tuple[PaceAt, ...] = ()
    """Observations by octave, rising."""

    def observed(self, rows: float, ratio: float) -> WorkerPace:
        """Return the pace after one more interval of steps over `rows` samples that took `ratio` times as long as
        usual."""
        if rows <= 0 or not 0 < ratio < math.inf:
            return self
        octave, log_ratio = max(0, round(math.log2(rows))), math.log(min(MAX_RATIO, max(MIN_RATIO, ratio)))
        by_octave = {at.octave: at for at in self.seen}
        _, weight, total = by_octave.get(octave, PaceAt(octave, 0.0, 0.0))
        by_octave[octave] = PaceAt(octave, weight * MEMORY + 1, total * MEMORY + log_ratio)
        return WorkerPace(tuple(by_octave[key] for key in sorted(by_octave)))

    @property
    def level(self) -> float:
        """Return the mean pace over all batch sizes."""
        return math.exp(self._level)

    @property
    def _level(self) -> float:
        return sum(at.total for at in self.seen) / (PRIOR + sum(at.weight for at in self.seen))

    def factors(self, rows: Floats) -> Floats:
        """Return the pace at each batch size, float64 [n], linear in the logarithm of the batch."""
        if not self.seen:
            return np.ones(len(rows))
        level = self._level
        values = [(at.total + PRIOR * level) / (at.weight + PRIOR) for at in self.seen]
        octaves = [float(at.octave) for at in self.seen]
        return np.asarray(np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), octaves, values)))


EVEN_PACE: Final = WorkerPace()
"""Pace of an average worker."""


class ThroughputCurve:
    """tput(b): tokens per second of a worker with b samples of `context` keys each on average.

    Flat beyond the rows that the worker decodes at once.
    """

    def __init__(self, costs: StageCosts, context: float, most: int, pace: WorkerPace = EVEN_PACE) -> None:
        """Prepare the curve for at most `most` samples."""
        base, slope = costs.token_tables
        rows = np.arange(most + 1, dtype=np.float64)
        at = np.minimum(rows, costs.max_batch_size).astype(np.int64)
        seconds = (base[at] + slope[at] * context) * pace.factors(np.asarray(at, dtype=np.float64))
        self._seconds: Floats = seconds * np.maximum(rows, 1.0) / np.maximum(at, 1)
        self._seconds[0] = 0.0

    def tokens_per_second(self, samples: int) -> float:
        """Return tput(samples)."""
        seconds = float(self._seconds[samples])
        return samples / seconds if seconds > 0 else 0.0

    def finish(self, left: Sequence[float] | Floats) -> float:
        """Return the seconds until samples with `left` remaining tokens each are finished: tput integrated as rows
        end."""
        ends = np.sort(np.asarray(left, dtype=np.float64))
        rows = np.arange(len(ends), 0, -1)
        return float(np.dot(np.diff(ends, prepend=0.0), self._seconds[rows])) if len(ends) else 0.0
