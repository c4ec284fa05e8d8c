"""What speculation gave in an iteration, from the steps themselves: the forecast of the next.

Rule: stretches of steps are grouped by samples a step, a group for each power of two, which counts at the mean of its
samples: in a tail most steps of a group are at one end of it. They are compared with what plain steps over as many
samples with as many keys take by the costs that were learned from plain steps. A stretch counts as a whole: steps in
which nothing could be drafted, and drafting that came to nothing, are part of what speculation gives. What was known of
a batch counts as much as what is new. Where nothing was verified there is nothing to gain. A stretch of few steps says
nothing, unless they are slow ones (`observed_steps.tells`). Must never read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.observed_steps import tells
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast, SpeculationPoint

MAX_TOKENS: Final = 64.0
"""Tokens a step that are believed: manifests allow 16 to be drafted."""
MIN_COST, MAX_COST = 0.1, 100.0
"""A step over a plain one stays within these: one hung step must not turn every forecast into nonsense."""
KEPT: Final = 0.5
"""Weight of what was known of a batch beside an iteration's steps."""


class DraftedSteps(NamedTuple):
    """A stretch of `steps` steps over `rows` samples with `context` keys each, of a worker that may draft."""

    steps: float
    rows: float
    context: float
    tokens: float
    """Drawn for one sample in one step, mean; 0: not known."""
    seconds: float
    """All steps together, drafting included, prefill left out."""
    verified: float
    """Steps of them in which drafts were verified."""


class _Sums:
    """Of the stretches at one batch size."""

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
            batch = KEPT * before.batch + (1 - KEPT) * batch  # of the same octave, as both are
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
    """Return the forecast after an iteration of these stretches; `plain_seconds` is that of a plain step by samples and
    keys. Batch sizes that were not seen stay as they were."""
    sums: dict[int, _Sums] = {}
    for stretch in stretches:
        if stretch.steps <= 0 or stretch.rows <= 0 or stretch.seconds <= 0 or stretch.tokens <= 0:
            continue
        plain = plain_seconds(stretch.rows, stretch.context)
        if plain > 0 and tells(stretch.steps, plain):
            sums.setdefault(_octave(stretch.rows), _Sums()).add(stretch, plain)
    points = {_octave(point.batch): point for point in before.points}
    if not points and not any(one.verified for one in sums.values()):
        return NO_SPECULATION
    points |= {octave: one.point(points.get(octave)) for octave, one in sums.items()}
    return SpeculationForecast(tuple(points[octave] for octave in sorted(points)), zero_allowed)


def _octave(rows: float) -> int:
    return max(0, round(math.log2(rows)))
