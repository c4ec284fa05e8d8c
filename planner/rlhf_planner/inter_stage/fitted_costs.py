"""Fits formulas for the time of a pass to a few measured times, in seconds.

Fits minimize relative squares with non-negative coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class StepTime(NamedTuple):
    """One pass over `batch` samples of `tokens` tokens each (decode: keys each) took `seconds`."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PassFormula:
    """Seconds of one pass: `setup + batch * (per_sample + tokens * per_token)`."""

    setup: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0

    @classmethod
    def fitted(cls, times: Iterable[StepTime]) -> PassFormula:
        """Return the least-relative-squares fit with non-negative coefficients. Without times all costs are zero.

        Raises ValueError for an impossible measurement.
        """
        rows = _checked(times)
        if not rows:
            return cls()
        features = np.array([[row.batch * row.tokens, row.batch, 1.0] for row in rows])
        per_token, per_sample, setup = non_negative(features, np.array([row.seconds for row in rows]))
        return cls(setup, per_sample, per_token)

    def seconds(self, batch: float, tokens: float) -> float:
        """Return the seconds of one pass over `batch` samples of `tokens` tokens each."""
        return self.setup + batch * (self.per_sample + tokens * self.per_token)


NO_COST: Final = PassFormula()
"""Formula of work without cost."""


@dataclass(frozen=True)
class DecodeLines:
    """Seconds of one decode step: at `batches[i]` samples `base[i] + slope[i] * context`; linear between batches."""

    batches: tuple[int, ...]
    base: tuple[float, ...]
    slope: tuple[float, ...]

    @classmethod
    def fitted(cls, times: Iterable[StepTime], weights: Sequence[float] | None = None) -> DecodeLines:
        """Return the lines fitted to the times. The base never falls as the batch grows.

        Raises ValueError without times or for an impossible time.
        """
        rows = _checked(times)
        if not rows:
            raise ValueError("no decode step was measured: at least one (batch, context, seconds) is needed")
        counts = np.ones(len(rows)) if weights is None else np.array(weights, dtype=np.float64)
        features = np.array([[1.0, row.batch, row.tokens, row.batch * row.tokens] for row in rows])
        _, _, rise, rise_a_row = non_negative(features, np.array([row.seconds for row in rows]), counts)
        batches = sorted({row.batch for row in rows})
        left: dict[int, list[tuple[float, float]]] = {batch: [] for batch in batches}
        for row, count in zip(rows, counts.tolist(), strict=True):
            left[row.batch].append((row.seconds - (rise + rise_a_row * row.batch) * row.tokens, count))
        totals = [sum(count for _, count in left[batch]) for batch in batches]
        means = [math.fsum(v * n for v, n in left[batch]) / total for batch, total in zip(batches, totals, strict=True)]
        base = _never_falling([max(0.0, mean) for mean in means], totals)
        return cls(tuple(batches), tuple(base), tuple(rise + rise_a_row * batch for batch in batches))

    def seconds(self, batch: float, context: float) -> float:
        """Return the seconds of one step of `batch` samples with `context` keys each.

        Outside the measured batches the value is that of the nearest one.
        """
        base, slope = (float(np.interp(batch, self.batches, values)) for values in (self.base, self.slope))
        return base + slope * context

    def tables(self, largest: int) -> tuple[Floats, Floats]:
        """Return (base, slope), each [largest + 1], by batch size; extrapolated linearly beyond the largest of several
        measured batches.
        """
        sizes = np.arange(largest + 1, dtype=np.float64)
        return _extended(sizes, self.batches, self.base), _extended(sizes, self.batches, self.slope)


def _checked(times: Iterable[StepTime]) -> list[StepTime]:
    rows = [StepTime(*row) for row in times]
    for row in rows:
        if row.batch < 1 or row.tokens < 0 or not 0 <= row.seconds < float("inf"):
            raise ValueError(f"measured time {row} is impossible: batch >= 1, tokens >= 0, finite seconds >= 0 are not")
    return rows


def non_negative(features: Floats, seconds: Floats, counts: Floats | None = None) -> tuple[float, ...]:
    """Solve non-negative least squares of relative errors by trying every subset of the columns.

    If the data cannot tell subsets apart, prefers few columns to many, and first columns to last ones.
    """
    columns = features.shape[1]
    weight = (1.0 if counts is None else np.sqrt(counts)) / np.maximum(seconds, 1e-9)
    best, least = np.zeros(columns), float("inf")
    for subset in sorted(range(1, 1 << columns), key=int.bit_count):
        chosen = [column for column in range(columns) if subset >> column & 1]
        if len(chosen) > len(seconds):
            continue
        part = features[:, chosen]
        solution = np.linalg.lstsq(part * weight[:, None], seconds * weight, rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(np.sum(((part @ solution - seconds) * weight) ** 2))
        if error < least - 1e-12:
            least, best = error, np.zeros(columns)
            best[chosen] = solution
    return tuple(float(value) for value in best)


def _never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest non-falling values in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, own, more = pools.pop()
            mean = (before * own + mean * total) / (own + total)
            total, count = total + own, count + more
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _extended(at: Floats, points: Sequence[int], values: Sequence[float]) -> Floats:
    answer = np.interp(at, points, values)
    if len(points) > 1:
        rise = max(0.0, (values[-1] - values[-2]) / (points[-1] - points[-2]))
        beyond = at > points[-1]
        answer[beyond] = values[-1] + rise * (at[beyond] - points[-1])
    return np.asarray(answer, dtype=np.float64)
