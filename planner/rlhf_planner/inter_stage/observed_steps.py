"""Observed decode steps of the last iterations, and the cost lines fitted to them.

Rule: observed steps determine the costs near their batch sizes and contexts. Elsewhere the scaled profile applies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.fitted_costs import DecodeLines, StepTime

PROFILE_WEIGHT: Final = 0.25
"""Weight of a profiled point; an observed interval has 1."""
MAX_WEIGHT: Final = 10.0
"""Maximum weight of a kind of step, in intervals."""
MIN_STEPS: Final = 8
"""Minimum steps of an interval, unless its steps are slow."""
MIN_SECONDS: Final = 0.1
"""Minimum expected seconds of an interval with fewer steps."""
CONTENDED_SHARE: Final = 0.5
"""Share of an interval with another worker's scoring from which the whole interval counts as contended."""
MIN_RATIO, MAX_RATIO = 0.1, 10.0
"""Limits of observed over forecast time."""
PROFILE_CONTEXTS: Final = (64.0, 1024.0)
"""Keys at which a profile's line is sampled."""


class DecodedSteps(NamedTuple):
    """An interval in which `steps` decode steps of `rows` samples with `context` keys each took `seconds` in total."""

    steps: float
    rows: float
    context: float
    seconds: float
    contended: float = 0.0
    """Share of the interval, 0..1, in which another generation worker scored."""


def tells(steps: float, expected: float) -> bool:
    """Return whether an interval of `steps` steps, expected to take `expected` seconds each, is informative."""
    return steps >= MIN_STEPS or steps * expected >= MIN_SECONDS


class ObservedStep(NamedTuple):
    """One kind of decode step in one iteration, converted to `batch` samples, a batch size of the profile."""

    batch: int
    octave: int
    """Octave of the context, which is from 2^octave to twice that."""
    contended: bool
    """Whether another generation worker scored during at least CONTENDED_SHARE of each interval."""
    context: float
    """Mean keys per sample."""
    seconds: float
    """Median seconds per step."""
    intervals: int
    """Number of observed intervals."""


def group_steps(decoded: Iterable[DecodedSteps], profile: DecodeLines) -> tuple[ObservedStep, ...]:
    """Return an iteration's steps by kind, without intervals of few fast steps."""
    groups: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for interval in decoded:
        if interval.steps <= 0 or interval.seconds <= 0 or interval.rows <= 0:
            continue
        if not tells(interval.steps, profile.seconds(interval.rows, interval.context)):
            continue
        batch = min(profile.batches, key=lambda measured: abs(math.log(measured / interval.rows)))
        context = max(1.0, interval.context)
        conversion = profile.seconds(batch, context) / max(1e-12, profile.seconds(interval.rows, context))
        kind = batch, int(math.log2(context)), interval.contended >= CONTENDED_SHARE
        groups.setdefault(kind, []).append((context, conversion * interval.seconds / interval.steps))
    return tuple(
        ObservedStep(*kind, statistics.fmean(c for c, _ in pairs), _median(s for _, s in pairs), len(pairs))
        for kind, pairs in sorted(groups.items())
    )


class RefittedSteps(NamedTuple):
    """Refitted costs of decode steps."""

    lines: DecodeLines
    """Cost lines of steps; without the steps beside another worker's scoring if those take longer."""
    contention_ratio: float
    """Ratio of steps while another worker scores to steps without; at least 1."""
    level: float
    """Median ratio of observed to profiled seconds over the kinds without contention, or over all if there are none."""


def refit_steps(profile: DecodeLines, iterations: Sequence[Sequence[ObservedStep]]) -> RefittedSteps:
    """Return the cost lines after these iterations; the profile if nothing was observed."""
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
    """Return the lines fitted to the observed steps, and loosely to the profile at this level."""
    points = [
        StepTime(batch, int(context), level * profile.seconds(batch, context))
        for batch in profile.batches
        for context in PROFILE_CONTEXTS
    ]
    points += [StepTime(step.batch, round(step.context), step.seconds) for step in kinds]
    weights = [PROFILE_WEIGHT] * (len(points) - len(kinds)) + [min(MAX_WEIGHT, step.intervals) for step in kinds]
    return DecodeLines.fitted(points, weights)


def _median_steps(profile: DecodeLines, iterations: Sequence[Sequence[ObservedStep]]) -> list[ObservedStep]:
    """Return the median over iterations of every kind of step, within limits around the profile."""
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
