"""How long responses get: learned from the last iterations, by prompt length, with a prior before the first.

Rule: a model is a value; `with_batch` makes the next one. A response that was cut at the limit is only known to be at
least that long, so distributions are Kaplan-Meier estimates; what lies beyond the longest seen response ends at the
limit. Prompt lengths count where they tell something (|rank correlation| of at least CORRELATION): samples then fall
into bands of prompt length, each with a distribution of its own. Must never answer a length below 1 or above the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOW: Final = 8
"""Iterations that are remembered: long enough for the tail, short enough to follow training."""
MOST_SAMPLES: Final = 16_384
"""Samples that are remembered; of larger iterations every k-th one."""
BANDS: Final = 4
"""Bands of prompt length at most."""
LEAST_IN_BAND: Final = 64
"""Samples that a band must hold: a tail is not seen in fewer."""
CORRELATION: Final = 0.1
"""Rank correlation of prompt and response below which prompt lengths are taken to tell nothing."""
DRIFT_LEVEL: Final = 1.63
"""Of the two-sample Kolmogorov-Smirnov test at 1%: distance > level * sqrt(1/n + 1/m) is not chance."""
LEAST_DRIFT: Final = 0.15
"""Distance below which nothing is forgotten: samples of one prompt are alike, so chance alone moves a batch further."""
PRIOR_SAMPLES: Final = 256
PRIOR_MEDIAN: Final = 1 / 8
"""Of the limit. Before anything is known: log-normal, one response in a hundred reaches the limit."""
PRIOR_P99: Final = 2.3263
"""Standard deviations to the 99th percentile of a normal distribution."""


@dataclass(frozen=True)
class Batch:
    """What one iteration showed."""

    prompts: Ints
    """[n] tokens."""
    responses: Ints
    """[n] tokens."""
    limit: int
    """Of a response; longer ones were cut."""


@dataclass(frozen=True)
class LengthModel:
    """Distribution of response lengths. See the module."""

    max_tokens: int
    """Limit of a response."""
    window: tuple[Batch, ...] = ()
    """Oldest first; empty: the prior holds."""
    drift: float = 0.0
    """Kolmogorov-Smirnov distance of the newest batch to the window before it, 0..1."""
    drifted: bool = False
    """The distance is large, and more than chance; the window began anew with the newest batch."""

    @classmethod
    def prior(cls, max_tokens: int) -> LengthModel:
        """Before the first iteration. Raises ValueError for a limit below 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, must be at least 1")
        return cls(max_tokens)

    def with_batch(self, pairs: Iterable[tuple[int, int]], limit: int | None = None) -> LengthModel:
        """The model after one more iteration of (prompt tokens, response tokens); `limit` when it was another one.

        An iteration without samples changes nothing. Raises ValueError for a negative length.
        """
        data = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        if len(data) == 0:
            return self
        if (data < 0).any():
            raise ValueError("lengths of prompts and responses must not be negative")
        data = data[:: -(-len(data) // MOST_SAMPLES)]
        new = Batch(data[:, 0], np.maximum(1, data[:, 1]), limit or self.max_tokens)
        distance, beyond_chance = _drift(self.window, new)
        kept = () if beyond_chance else self.window[-(WINDOW - 1) :]
        return dataclasses.replace(self, window=_trimmed((*kept, new)), drift=distance, drifted=beyond_chance)

    # ---------------------------------------------------------------- questions

    def remaining(self, so_far: int, prompt_tokens: int) -> float:
        """Expected tokens still to come of a response that has `so_far` and goes on; 0 at the limit."""
        return float(self.remaining_each(np.array([so_far]), np.array([prompt_tokens]))[0])

    def remaining_each(self, so_far: Ints, prompts: Ints) -> Floats:
        """The same for many samples: [n], [n] -> [n]."""
        answer = np.empty(len(so_far))
        bands = self._bands_of(prompts)
        for band in np.unique(bands):
            chosen = bands == band
            answer[chosen] = self._curves[band].remaining(so_far[chosen], self.max_tokens)
        return answer

    def draw(self, generator: np.random.Generator, prompt_lengths: Sequence[int] | Ints) -> Ints:
        """[n] one possible response length, 1..max_tokens, for each prompt."""
        prompts = np.asarray(prompt_lengths, dtype=np.int64)
        chance = generator.random(len(prompts))
        answer = np.empty(len(prompts), dtype=np.int64)
        bands = self._bands_of(prompts)
        for band in np.unique(bands):
            chosen = bands == band
            answer[chosen] = self._curves[band].quantile(chance[chosen])
        return answer

    @property
    def samples(self) -> int:
        """Responses that are remembered; 0: the prior holds."""
        return sum(len(batch.responses) for batch in self.window)

    @cached_property
    def correlation(self) -> float:
        """Rank correlation of prompt and response lengths in the window, -1..1."""
        prompts, responses, _ = self._all
        if len(prompts) < 2:
            return 0.0
        first, second = _ranks(prompts), _ranks(responses)
        spread = float(first.std() * second.std())
        return float(((first - first.mean()) * (second - second.mean())).mean()) / spread if spread > 0 else 0.0

    # ---------------------------------------------------------------- what they are answered from

    @cached_property
    def _all(self) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """(prompts, responses, cut) of the window."""
        if not self.window:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, np.zeros(0, dtype=np.bool_)
        prompts = np.concatenate([batch.prompts for batch in self.window])
        responses = np.concatenate([batch.responses for batch in self.window])
        cut = np.concatenate([batch.responses >= batch.limit for batch in self.window])
        return prompts, responses, cut

    @cached_property
    def _edges(self) -> Ints:
        """Prompt lengths at which the next band begins."""
        prompts, _, _ = self._all
        bands = min(BANDS, len(prompts) // LEAST_IN_BAND)
        if bands < 2 or abs(self.correlation) < CORRELATION:
            return np.zeros(0, dtype=np.int64)
        shares = np.arange(1, bands) / bands
        return np.unique(np.quantile(prompts, shares, method="nearest").astype(np.int64))

    def _bands_of(self, prompts: Ints) -> Ints:
        return np.searchsorted(self._edges, prompts, side="left").astype(np.int64)

    @cached_property
    def _curves(self) -> tuple[Curve, ...]:
        if not self.window:
            return (_prior_curve(self.max_tokens),)
        prompts, responses, cut = self._all
        bands = self._bands_of(prompts)
        whole = Curve.estimated(responses, cut, self.max_tokens)
        return tuple(
            Curve.estimated(responses[bands == band], cut[bands == band], self.max_tokens)
            if (bands == band).any()
            else whole
            for band in range(len(self._edges) + 1)
        )


@dataclass(frozen=True)
class Curve:
    """A distribution of lengths: `lengths[i]` with `probability[i]`, rising."""

    lengths: Ints
    probability: Floats

    @classmethod
    def estimated(cls, responses: Ints, cut: npt.NDArray[np.bool_], limit: int) -> Curve:
        """Kaplan-Meier: a cut response was at risk up to its length, and did not end there."""
        lengths, where = np.unique(np.minimum(responses, limit), return_inverse=True)
        ended = np.bincount(where, weights=(~cut).astype(np.float64), minlength=len(lengths))
        seen = np.bincount(where, minlength=len(lengths)).astype(np.float64)
        at_risk = seen[::-1].cumsum()[::-1]
        survival = np.cumprod(1 - ended / at_risk)
        probability = np.concatenate([[1.0], survival[:-1]]) - survival
        return cls._ending_at(lengths, probability, float(survival[-1]), limit)

    @classmethod
    def _ending_at(cls, lengths: Ints, probability: Floats, beyond: float, limit: int) -> Curve:
        """What lies beyond the last ends at the limit: that is how long it is decoded."""
        if lengths[-1] == limit:
            probability = probability.copy()
            probability[-1] += beyond
        elif beyond > 0:
            lengths, probability = np.append(lengths, limit), np.append(probability, beyond)
        kept = probability > 0
        return cls(lengths[kept], probability[kept] / probability.sum())

    def quantile(self, chance: Floats) -> Ints:
        """[n] in 0..1 -> [n] lengths."""
        return self.lengths[np.minimum(np.searchsorted(self._total, chance, side="right"), len(self.lengths) - 1)]

    def remaining(self, so_far: Ints, limit: int) -> Floats:
        """[n] expected length - so_far, of those longer than so_far; none seen: half of what the limit leaves."""
        at = np.searchsorted(self.lengths, so_far, side="right")
        known = at < len(self.lengths)
        index = np.minimum(at, len(self.lengths) - 1)
        mean = self._mass_beyond[index] / self._beyond[index]
        guess = np.maximum(0.0, limit - so_far) / 2
        return np.where(known, np.maximum(0.0, mean - so_far), guess)

    @cached_property
    def _total(self) -> Floats:
        return self.probability.cumsum()

    @cached_property
    def _beyond(self) -> Floats:
        return self.probability[::-1].cumsum()[::-1]

    @cached_property
    def _mass_beyond(self) -> Floats:
        return (self.probability * self.lengths)[::-1].cumsum()[::-1]


def _prior_curve(limit: int) -> Curve:
    """Log-normal with its median at PRIOR_MEDIAN of the limit and its 99th percentile at the limit."""
    sigma = math.log(1 / PRIOR_MEDIAN) / PRIOR_P99
    middles = (np.arange(PRIOR_SAMPLES) + 0.5) / PRIOR_SAMPLES
    lengths = limit * PRIOR_MEDIAN * np.exp(sigma * _normal_quantile(middles))
    whole = np.clip(np.rint(lengths), 1, limit).astype(np.int64)
    return Curve.estimated(whole, np.zeros(PRIOR_SAMPLES, dtype=np.bool_), limit)


def _normal_quantile(chance: Floats) -> Floats:
    return np.array([NormalDist().inv_cdf(float(value)) for value in chance])


def _drift(window: tuple[Batch, ...], new: Batch) -> tuple[float, bool]:
    """(Kolmogorov-Smirnov distance of `new` to the window, whether it is more than chance)."""
    if not window:
        return 0.0, False
    old = np.sort(np.concatenate([batch.responses for batch in window]))
    own = np.sort(new.responses)
    points = np.concatenate([old, own])
    shares = [np.searchsorted(values, points, side="right") / len(values) for values in (old, own)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    return distance, distance > max(LEAST_DRIFT, DRIFT_LEVEL * math.sqrt(1 / len(old) + 1 / len(own)))


def _trimmed(window: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """The newest batches that fit into MOST_SAMPLES, the newest in any case."""
    total, kept = 0, 0
    for batch in reversed(window):
        total += len(batch.responses)
        if kept and total > MOST_SAMPLES:
            break
        kept += 1
    return window[-kept:]


def _ranks(values: Ints) -> Floats:
    """Ranks, equal values share the middle one."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return np.asarray((last - (counts - 1) / 2)[where], dtype=np.float64)
