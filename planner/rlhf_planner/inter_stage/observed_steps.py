"""What decode steps took in the last iterations, and the cost lines that follow from that.

Rule: a profile is a second of a machine's life, iterations are hours of it. Where steps were observed they count, at
the batch sizes and contexts that the job has; elsewhere the profile counts, scaled to the level of the observed
steps. Steps that ran while another generation worker scored are kept apart: on devices that share something (cores,
memory, a power limit) they take longer, and a tail pays that for fusion. Of every kind of step the median of the
iterations counts, so that two odd iterations of five change nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.fitted_costs import DecodeLines, StepTime

PROFILE_WEIGHT: Final = 0.25
"""Weight of a profiled point where an observed interval has 1: it holds the shape where nothing was observed."""
MAX_WEIGHT: Final = 10.0
"""Weight of a kind of step, in intervals: noise that lasts is not averaged away by more of them."""
MIN_STEPS: Final = 8
"""Steps of an interval: one of fewer mostly took what begins and ends it, unless its steps are slow."""
MIN_SECONDS: Final = 0.1
"""What the steps of an interval with fewer must be expected to take: beside that, its beginning and end are little."""
CONTENDED_SHARE: Final = 0.5
"""Share of an interval in which another worker scored, from which on all of it counts as contended."""
MIN_RATIO, MAX_RATIO = 0.1, 10.0
"""Observed over forecast stays within these: one hung step must not turn every forecast into nonsense."""
PROFILE_CONTEXTS: Final = (64.0, 1024.0)
"""Keys at which a profile's line is kept as points."""


class DecodedSteps(NamedTuple):
    """An interval in which `steps` decode steps of `rows` samples with `context` keys each took `seconds` in all."""

    steps: float
    rows: float
    context: float
    seconds: float
    contended: float = 0.0
    """Share of the interval, 0..1, in which another generation worker scored."""


def tells(steps: float, expected: float) -> bool:
    """Return whether an interval of so many steps says what a step takes; `expected` seconds of a plain one are known.

    By what is expected and not by what it took: a few fast steps that were held up say what held them up.
    """
    return steps >= MIN_STEPS or steps * expected >= MIN_SECONDS


class ObservedStep(NamedTuple):
    """One kind of decode step in one iteration, converted to `batch` samples, a batch size of the profile."""

    batch: int
    octave: int
    """Of the context, which is between 2^octave and twice that."""
    contended: bool
    """Another generation worker scored at the same time."""
    context: float
    """Keys per sample, mean."""
    seconds: float
    """Per step, median."""
    intervals: int
    """How many were observed."""


def group_steps(decoded: Iterable[DecodedSteps], profile: DecodeLines) -> tuple[ObservedStep, ...]:
    """Return an iteration's steps by kind; intervals of few fast steps are left out."""
    groups: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for interval in decoded:
        if interval.steps <= 0 or interval.seconds <= 0 or interval.rows <= 0:
            continue
        if not tells(interval.steps, profile.seconds(interval.rows, interval.context)):
            continue
        batch = min(profile.batches, key=lambda known: abs(math.log(known / interval.rows)))
        context = max(1.0, interval.context)
        conversion = profile.seconds(batch, context) / max(1e-12, profile.seconds(interval.rows, context))
        kind = batch, int(math.log2(context)), interval.contended >= CONTENDED_SHARE
        groups.setdefault(kind, []).append((context, conversion * interval.seconds / interval.steps))
    return tuple(
        ObservedStep(*kind, statistics.fmean(c for c, _ in pairs), _median(s for _, s in pairs), len(pairs))
        for kind, pairs in sorted(groups.items())
    )


class RefittedSteps(NamedTuple):
    """Decode steps as they are now."""

    lines: DecodeLines
    """Of steps while no other generation worker scores."""
    contention_ratio: float
    """How many times as long they take while another one scores; at least 1, as contention makes nothing faster."""
    level: float
    """Observed over profiled seconds, median of all kinds."""


def refit_steps(profile: DecodeLines, iterations: Sequence[Sequence[ObservedStep]]) -> RefittedSteps:
    """Return the cost lines after these iterations; the profile as it is when nothing was observed."""
    kinds = _median_steps(profile, iterations)
    alone = [step for step in kinds if not step.contended]
    if not kinds:
        return RefittedSteps(profile, 1.0, 1.0)
    level = _median(_ratio(step, profile) for step in alone or kinds)
    lines = _fitted(profile, level, alone)
    contended = [step for step in kinds if step.contended]
    ratios = [_ratio(step, lines) for step in contended for _ in range(min(int(MAX_WEIGHT), step.intervals))]
    contention_ratio = _median(ratios) if ratios and alone else 1.0
    if contention_ratio > 1:
        return RefittedSteps(lines, contention_ratio, level)
    return RefittedSteps(_fitted(profile, level, kinds), 1.0, level)


def _fitted(profile: DecodeLines, level: float, kinds: Sequence[ObservedStep]) -> DecodeLines:
    """Fit to the observed steps, and loosely to the profile at this level."""
    points = [
        StepTime(batch, int(context), level * profile.seconds(batch, context))
        for batch in profile.batches
        for context in PROFILE_CONTEXTS
    ]
    points += [StepTime(step.batch, round(step.context), step.seconds) for step in kinds]
    weights = [PROFILE_WEIGHT] * (len(points) - len(kinds)) + [min(MAX_WEIGHT, step.intervals) for step in kinds]
    return DecodeLines.fitted(points, weights)


def _median_steps(profile: DecodeLines, iterations: Sequence[Sequence[ObservedStep]]) -> list[ObservedStep]:
    """Return the median over iterations of every kind of step, never further from the profile than the limits."""
    groups: dict[tuple[int, int, bool], list[ObservedStep]] = {}
    for iteration in iterations:
        for step in iteration:
            groups.setdefault((step.batch, step.octave, step.contended), []).append(step)
    medians = []
    for _, steps in sorted(groups.items()):
        context = statistics.fmean(step.context for step in steps)
        ratio = min(MAX_RATIO, max(MIN_RATIO, _median(_ratio(step, profile) for step in steps)))
        seconds = ratio * profile.seconds(steps[0].batch, context)
        intervals = sum(step.intervals for step in steps)
        medians.append(steps[0]._replace(context=context, seconds=seconds, intervals=intervals))
    return medians


def _ratio(step: ObservedStep, lines: DecodeLines) -> float:
    return step.seconds / max(1e-12, lines.seconds(step.batch, step.context))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
