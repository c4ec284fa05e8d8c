"""Tokens a second of a worker over the samples that it decodes: learned costs, drafts and the worker's own pace.

Rule: one shape for all workers of a job, which is learned from all of them, and for each worker how many times as long
the same work takes there, by batch, which is learned from its own steps. Of a worker of which little was seen the pace
is nearly that of all: PRIOR stretches of work at pace 1 are counted in. Must never read a clock.
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
"""Stretches of work, of half a second or more, at the pace of all workers: noise of a few steps moves no sample."""
MEMORY: Final = 0.95
"""Weight of what was known, by each stretch: a window of twenty, so a neighbour that comes or goes is noticed."""


class PaceAt(NamedTuple):
    """What was seen of one batch size, a power of two."""

    octave: int
    weight: float
    """Stretches of work, damped."""
    total: float
    """Of logarithms of how many times as long they took as on all workers, likewise."""


@dataclass(frozen=True)
class WorkerPace:
    """How many times as long the same work takes on one worker as on all, by batch."""

    seen: tuple[PaceAt, ...] = ()
    """By octave, which rises."""

    def observed(self, rows: float, ratio: float) -> WorkerPace:
        """Return the pace after one more stretch of steps over `rows` samples that took `ratio` times as long."""
        if rows <= 0 or not 0 < ratio < math.inf:
            return self
        octave, log_ratio = max(0, round(math.log2(rows))), math.log(min(MAX_RATIO, max(MIN_RATIO, ratio)))
        known = {at.octave: at for at in self.seen}
        _, weight, total = known.get(octave, PaceAt(octave, 0.0, 0.0))
        known[octave] = PaceAt(octave, weight * MEMORY + 1, total * MEMORY + log_ratio)
        return WorkerPace(tuple(known[key] for key in sorted(known)))

    @property
    def level(self) -> float:
        """Return the pace over all batches."""
        return math.exp(self._level)

    @property
    def _level(self) -> float:
        return sum(at.total for at in self.seen) / (PRIOR + sum(at.weight for at in self.seen))

    def factors(self, rows: Floats) -> Floats:
        """Return the pace at each batch size, float64 [n]: linear over the logarithm of the batch."""
        if not self.seen:
            return np.ones(len(rows))
        level = self._level
        values = [(at.total + PRIOR * level) / (at.weight + PRIOR) for at in self.seen]
        octaves = [float(at.octave) for at in self.seen]
        return np.asarray(np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), octaves, values)))


EVEN_PACE: Final = WorkerPace()
"""As fast as all workers."""


class ThroughputCurve:
    """tput(b): the tokens a second of a worker that holds b samples, whose keys are `context` each on average.

    Beyond the rows that it decodes at once samples take turns, and it is flat.
    """

    def __init__(self, costs: StageCosts, context: float, most: int, pace: WorkerPace = EVEN_PACE) -> None:
        """`most`: samples that it will be asked about at most."""
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
        """Return the seconds until samples of `left` tokens each are finished: tput integrated, as rows end."""
        ends = np.sort(np.asarray(left, dtype=np.float64))
        rows = np.arange(len(ends), 0, -1)
        return float(np.dot(np.diff(ends, prepend=0.0), self._seconds[rows])) if len(ends) else 0.0
