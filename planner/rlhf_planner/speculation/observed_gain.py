"""Measures the effect of speculation in an iteration, as the forecast for the next one.

Intervals of steps are grouped by samples per step, one group for each power of two. They are compared with plain steps
over as many samples and keys, at the learned cost. Must never read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.observed_steps import tells
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast, SpeculationPoint

MAX_TOKENS: Final = 64.0
"""Maximum plausible tokens per sample and step."""
MIN_COST, MAX_COST = 0.1, 100.0
"""Limits of a step's time relative to a plain one."""
KEPT: Final = 0.5
"""Share of the earlier values of a batch size in its new point."""


class DraftedSteps(NamedTuple):
    """An interval of `steps` steps over `rows` samples with `context` keys each, of a worker that may draft."""

    steps: float
    rows: float
    context: float
    tokens: float
    """Mean tokens per sample and step; 0 if unknown."""
    seconds: float
    """Seconds of all steps, including drafting but not prefill."""
    verified: float
    """Number of steps that verified drafts."""


class _Sums:
    """Sums over the intervals at one batch size."""

    def __init__(self) -> None:
        self.steps = self.rows = self.tokens = self.seconds = self.plain = self.verified = 0.0

    def add(self, stretch: DraftedSteps, plain_seconds: float) -> None:
        self.steps += stretch.steps
        self.rows += stretch.steps * stretch.rows
        self.tokens += stretch.steps * stretch.rows * min(MAX_TOKENS, stretch.tokens)
        self.seconds += stretch.seconds
        self.plain += stretch.steps * plain_seconds
        self.verified += stretch.verified

    def point(self, before: SpeculationPoint | None) -> SpeculationPoint:
        batch, plain = max(1.0, self.rows / self.steps), self.plain / self.steps
        if not self.verified:
            return SpeculationPoint(batch, 1.0, plain, plain)
        tokens, cost = max(1.0, self.tokens / self.rows), self.seconds / self.plain
        cost = min(MAX_COST, max(MIN_COST, cost))
        if before is not None:
            batch = KEPT * before.batch + (1 - KEPT) * batch  # same octave, because both are
            tokens = KEPT * before.tokens + (1 - KEPT) * tokens
            cost = KEPT * before.cost + (1 - KEPT) * cost
        return SpeculationPoint(batch, tokens, cost * plain, plain)


def observed_forecast(
    before: SpeculationForecast,
    stretches: Iterable[DraftedSteps],
    plain_seconds: Callable[[float, float], float],
    *,
    zero_allowed: bool,
) -> SpeculationForecast:
    """Return the forecast after an iteration of these intervals.

    `plain_seconds` returns the seconds of a plain step by samples and keys. Batch sizes without intervals keep their
    points.
    """
    sums: dict[int, _Sums] = {}
    for stretch in stretches:
        if stretch.steps <= 0 or stretch.rows <= 0 or stretch.seconds <= 0 or stretch.tokens <= 0:
            continue
        plain = plain_seconds(stretch.rows, stretch.context)
        if plain > 0 and tells(stretch.steps, plain):
            sums.setdefault(_octave(stretch.rows), _Sums()).add(stretch, plain)
    points = {_octave(point.batch): point for point in before.points}
    if not points and not any(observed.verified for observed in sums.values()):
        return NO_SPECULATION
    points |= {octave: observed.point(points.get(octave)) for octave, observed in sums.items()}
    return SpeculationForecast(tuple(points[octave] for octave in sorted(points)), zero_allowed)


def _octave(rows: float) -> int:
    return max(0, round(math.log2(rows)))
