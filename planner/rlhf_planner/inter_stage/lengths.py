"""Predicts response lengths from the last iterations, by prompt and prompt length; uses a prior before the first.

Distributions are Kaplan-Meier estimates, because the limit cuts responses. Must never predict a length below 1 or above
the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf_planner.inter_stage.length_distribution import (
    Floats,
    Ints,
    LengthDistribution,
    normal_share,
    prior_distribution,
)
from rlhf_planner.inter_stage.prompt_effects import PromptEffects

WINDOW: Final = 8
"""Maximum number of remembered iterations."""
MAX_SAMPLES: Final = 16_384
"""Maximum number of samples that are remembered; larger iterations contribute every k-th sample."""
BANDS: Final = 4
"""Maximum number of bands of prompt length."""
MIN_IN_BAND: Final = 64
"""Minimum mean samples per band, where there are several bands."""
CORRELATION: Final = 0.1
"""Absolute rank correlation of prompt and response lengths below which prompt lengths are not used."""
DRIFT_LEVEL: Final = 1.63
"""Level of the two-sample Kolmogorov-Smirnov test at 1%: distance > level * sqrt(1/n + 1/m) is not randomness."""
TILT: Final = 0.1
"""Rounding of prompt effects in standard deviations, so that similar samples share a distribution."""
MIN_DRIFT: Final = 0.15
"""Kolmogorov-Smirnov distance up to which a batch does not count as drift."""


@dataclass(frozen=True)
class LengthBatch:
    """Lengths observed in one iteration."""

    prompts: Ints
    """[n] prompt tokens."""
    responses: Ints
    """[n] response tokens."""
    limit: int
    """Maximum response tokens; longer responses were cut."""


@dataclass(frozen=True)
class LengthModel:
    """Distribution of response lengths. See the module."""

    max_tokens: int
    """Maximum tokens of a response."""
    window: tuple[LengthBatch, ...] = ()
    """Batches, oldest first; without batches the prior applies."""
    drift: float = 0.0
    """Kolmogorov-Smirnov distance of the newest batch to the window before it, 0..1."""
    drifted: bool = False
    """Whether the distance is large and not due to randomness. The window then restarts with the newest batch."""
    by_prompt: PromptEffects = field(default_factory=PromptEffects)
    """Effects of single prompts."""

    @classmethod
    def prior(cls, max_tokens: int) -> LengthModel:
        """Return the model before the first iteration. Raises ValueError for a limit below 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, must be at least 1")
        return cls(max_tokens)

    def with_batch(
        self, pairs: Iterable[tuple[int, int]], limit: int | None = None, lines: Sequence[int] = ()
    ) -> LengthModel:
        """Return the model after one more iteration of (prompt tokens, response tokens).

        `lines` has the line of each sample's prompt in the prompts file, or is empty. Raises ValueError for a negative
        length, or a wrong number of lines.
        """
        data = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        if len(data) == 0:
            return self
        if (data < 0).any():
            raise ValueError("lengths of prompts and responses must not be negative")
        if len(lines) not in (0, len(data)):
            raise ValueError(f"lines names the prompts of {len(lines)} samples, there are {len(data)}")
        step = -(-len(data) // MAX_SAMPLES)
        new = LengthBatch(data[::step, 0], np.maximum(1, data[::step, 1]), limit or self.max_tokens)
        distance, drifted = _drift(self.window, new)
        earlier = () if drifted else self.window[-(WINDOW - 1) :]
        after = dataclasses.replace(self, window=_trimmed((*earlier, new)), drift=distance, drifted=drifted)
        if not len(lines):
            return after
        by_prompt = self.by_prompt.with_batch(np.asarray(lines, dtype=np.int64), after._scores(data[:, 0], data[:, 1]))
        return dataclasses.replace(after, by_prompt=by_prompt)

    # ---------------------------------------------------------------- questions

    def remaining(self, so_far: int, prompt_tokens: int) -> float:
        """Return the expected remaining tokens of a response that has `so_far` and continues; 0 at the limit."""
        return float(self.remaining_each(np.array([so_far]), np.array([prompt_tokens]))[0])

    def remaining_each(self, so_far: Ints, prompts: Ints, lines: Sequence[int] | Ints = ()) -> Floats:
        """Return the expected remaining tokens of many samples, float64 [n].

        `so_far` and `prompts` are tokens, int64 [n]. `lines` is as in `with_batch`, [n] or empty.
        """
        answer = np.empty(len(so_far))
        bands = self._bands_of(prompts)
        if not self.by_prompt.share or not len(lines):
            for band in np.unique(bands):
                chosen = bands == band
                answer[chosen] = self._curves[band].remaining(so_far[chosen], self.max_tokens)
            return answer
        mean, left = self.by_prompt.expected(np.asarray(lines, dtype=np.int64))
        kinds = np.stack([bands, np.rint(mean / TILT), np.rint(left / TILT)], axis=1)
        for kind in np.unique(kinds, axis=0):
            chosen = (kinds == kind).all(axis=1)
            answer[chosen] = self._tilted(*kind).remaining(so_far[chosen], self.max_tokens)
        return answer

    def _tilted(self, band: float, mean: float, left: float) -> LengthDistribution:
        """Return a band's distribution for this expected prompt effect and remaining variance, both in steps of
        TILT."""
        if (band, mean, left) not in self._tilts:
            deviation = math.sqrt(left * TILT + 1 - self.by_prompt.share)
            self._tilts[band, mean, left] = self._curves[int(band)].tilted(mean * TILT, deviation)
        return self._tilts[band, mean, left]

    def draw(
        self,
        generator: np.random.Generator,
        prompt_lengths: Sequence[int] | Ints,
        lines: Sequence[int] | Ints = (),
    ) -> Ints:
        """Return one possible response length, 1..max_tokens, for each prompt, int64 [n].

        `lines` is as in `with_batch`.
        """
        prompts = np.asarray(prompt_lengths, dtype=np.int64)
        quantiles = self._quantiles(generator, len(prompts), np.asarray(lines, dtype=np.int64))
        answer = np.empty(len(prompts), dtype=np.int64)
        bands = self._bands_of(prompts)
        for band in np.unique(bands):
            chosen = bands == band
            answer[chosen] = self._curves[band].quantile(quantiles[chosen])
        return answer

    def _quantiles(self, generator: np.random.Generator, count: int, lines: Ints) -> Floats:
        """Return [n] quantiles, correlated for samples of one prompt if prompts are informative."""
        if not self.by_prompt.share or not len(lines):
            return generator.random(count)
        names, where = np.unique(lines, return_inverse=True)
        mean, left = self.by_prompt.expected(names)
        effect = mean + np.sqrt(left) * generator.standard_normal(len(names))
        rest = math.sqrt(1 - self.by_prompt.share) * generator.standard_normal(count)
        return normal_share(effect[where] + rest)

    def _scores(self, prompts: Ints, responses: Ints) -> Floats:
        """Return [n] normal scores of responses, each within its band."""
        answer = np.empty(len(prompts))
        bands = self._bands_of(prompts)
        for band in np.unique(bands):
            chosen = bands == band
            answer[chosen] = self._curves[band].scores(responses[chosen])
        return answer

    @property
    def samples(self) -> int:
        """Number of remembered responses; 0 means that the prior applies."""
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
        """Longest prompt, in tokens, of each band but the last."""
        prompts, _, _ = self._all
        bands = min(BANDS, len(prompts) // MIN_IN_BAND)
        if bands < 2 or abs(self.correlation) < CORRELATION:
            return np.zeros(0, dtype=np.int64)
        shares = np.arange(1, bands) / bands
        return np.unique(np.quantile(prompts, shares, method="nearest").astype(np.int64))

    def _bands_of(self, prompts: Ints) -> Ints:
        return np.searchsorted(self._edges, prompts, side="left").astype(np.int64)

    @cached_property
    def _tilts(self) -> dict[tuple[float, float, float], LengthDistribution]:
        return {}

    @cached_property
    def _curves(self) -> tuple[LengthDistribution, ...]:
        if not self.window:
            return (prior_distribution(self.max_tokens),)
        prompts, responses, cut = self._all
        bands = self._bands_of(prompts)
        whole = LengthDistribution.estimated(responses, cut, self.max_tokens)
        return tuple(
            LengthDistribution.estimated(responses[bands == band], cut[bands == band], self.max_tokens)
            if (bands == band).any()
            else whole
            for band in range(len(self._edges) + 1)
        )


def _drift(window: tuple[LengthBatch, ...], new: LengthBatch) -> tuple[float, bool]:
    """Return (Kolmogorov-Smirnov distance of `new` to the window, whether it counts as drift)."""
    if not window:
        return 0.0, False
    old = np.sort(np.concatenate([batch.responses for batch in window]))
    own = np.sort(new.responses)
    points = np.concatenate([old, own])
    shares = [np.searchsorted(values, points, side="right") / len(values) for values in (old, own)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    return distance, distance > max(MIN_DRIFT, DRIFT_LEVEL * math.sqrt(1 / len(old) + 1 / len(own)))


def _trimmed(window: tuple[LengthBatch, ...]) -> tuple[LengthBatch, ...]:
    """Return the newest batches that fit into MAX_SAMPLES, always with the newest."""
    total, count = 0, 0
    for batch in reversed(window):
        total += len(batch.responses)
        if count and total > MAX_SAMPLES:
            break
        count += 1
    return window[-count:]


def _ranks(values: Ints) -> Floats:
    """Return ranks; equal values share the middle rank."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return np.asarray((last - (counts - 1) / 2)[where], dtype=np.float64)
