"""A distribution of response lengths: estimate it, draw from it, tilt it by knowledge of a prompt.

A normal score is the position of a length in its distribution, in standard deviations of a normal one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR_SAMPLES: Final = 256
PRIOR_MEDIAN: Final = 1 / 8
"""Prior median as a share of the limit. The prior is log-normal; about one response in a hundred reaches the limit."""
PRIOR_P99: Final = 2.3263
"""Standard deviations to the 99th percentile of a normal distribution."""
TABLE: Final = np.linspace(-8.0, 8.0, 8001)
"""Normal scores at which the normal distribution is tabulated; the probability beyond them is negligible."""
SHARES: Final[Floats] = np.array([NormalDist().cdf(float(score)) for score in TABLE])


def normal_share(score: Floats) -> Floats:
    """Return the shares of a normal distribution below `score`, by interpolation.

    Both are float64 [n]; scores are in standard deviations.
    """
    return np.interp(score, TABLE, SHARES)


def normal_quantile(probability: Floats) -> Floats:
    """Return the normal scores, within +-8, below which these shares (0..1) lie; both float64 [n]."""
    return np.interp(probability, SHARES, TABLE)


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths: `lengths[i]`, rising, with `probability[i]`."""

    lengths: Ints
    probability: Floats

    @classmethod
    def estimated(cls, responses: Ints, cut: npt.NDArray[np.bool_], limit: int) -> LengthDistribution:
        """Return the Kaplan-Meier estimate of `responses` int64 [n].

        A `cut` response (bool [n]) was at risk up to its length and did not end there.
        """
        lengths, where = np.unique(np.minimum(responses, limit), return_inverse=True)
        ended = np.bincount(where, weights=(~cut).astype(np.float64), minlength=len(lengths))
        seen = np.bincount(where, minlength=len(lengths)).astype(np.float64)
        at_risk = seen[::-1].cumsum()[::-1]
        survival = np.cumprod(1 - ended / at_risk)
        probability = np.concatenate([[1.0], survival[:-1]]) - survival
        return cls._ending_at(lengths, probability, float(survival[-1]), limit)

    @classmethod
    def _ending_at(cls, lengths: Ints, probability: Floats, beyond: float, limit: int) -> LengthDistribution:
        """Return the distribution with the probability `beyond` the last length placed at the limit, where decoding
        stops."""
        if lengths[-1] == limit:
            probability = probability.copy()
            probability[-1] += beyond
        elif beyond > 0:
            lengths, probability = np.append(lengths, limit), np.append(probability, beyond)
        possible = probability > 0
        return cls(lengths[possible], probability[possible] / probability.sum())

    def quantile(self, probability: Floats) -> Ints:
        """Return the quantiles at these shares (0..1, float64 [n]): lengths, int64 [n]."""
        return self.lengths[np.minimum(np.searchsorted(self._total, probability, side="right"), len(self.lengths) - 1)]

    def scores(self, lengths: Ints) -> Floats:
        """Return the normal scores of lengths (int64 [n]) in this distribution (mid-ranks); float64 [n]."""
        at = np.minimum(np.searchsorted(self.lengths, lengths), len(self.lengths) - 1)
        return normal_quantile(self._total[at] - self.probability[at] / 2)

    def tilted(self, mean: float, deviation: float) -> LengthDistribution:
        """Return the distribution of lengths whose normal score has this mean and deviation; (0, 1) is this
        distribution."""
        edges = normal_quantile(np.concatenate([[0.0], self._total]))
        below = normal_share((edges - mean) / deviation)
        below[0], below[-1] = 0.0, 1.0
        probability = np.diff(below)
        possible = probability > 0
        return LengthDistribution(self.lengths[possible], probability[possible])

    def remaining(self, so_far: Ints, limit: int) -> Floats:
        """Return the expected length minus `so_far` (int64 [n]) of longer responses, float64 [n].

        Where no longer response was observed, it is half of the tokens up to the limit.
        """
        at = np.searchsorted(self.lengths, so_far, side="right")
        in_range = at < len(self.lengths)
        index = np.minimum(at, len(self.lengths) - 1)
        mean = self._mass_beyond[index] / self._beyond[index]
        guess = np.maximum(0.0, limit - so_far) / 2
        return np.where(in_range, np.maximum(0.0, mean - so_far), guess)

    @cached_property
    def _total(self) -> Floats:
        return self.probability.cumsum()

    @cached_property
    def _beyond(self) -> Floats:
        return self.probability[::-1].cumsum()[::-1]

    @cached_property
    def _mass_beyond(self) -> Floats:
        return (self.probability * self.lengths)[::-1].cumsum()[::-1]


def prior_distribution(limit: int) -> LengthDistribution:
    """Return a log-normal distribution, cut off at its 99th percentile, `limit`; the median is PRIOR_MEDIAN of it."""
    sigma = math.log(1 / PRIOR_MEDIAN) / PRIOR_P99
    middles = (np.arange(PRIOR_SAMPLES) + 0.5) / PRIOR_SAMPLES
    lengths = limit * PRIOR_MEDIAN * np.exp(sigma * normal_quantile(middles))
    whole = np.clip(np.rint(lengths), 1, limit).astype(np.int64)
    return LengthDistribution.estimated(whole, np.zeros(PRIOR_SAMPLES, dtype=np.bool_), limit)
