"""What decode steps really took in the last iterations, and the lines that follow from it.

Rule: a profile is a second of a machine's life, iterations are hours of it: where steps were seen they count, at the
batch sizes and contexts that the job has; where none were, the profile does, at the level of those that were. Steps
that ran while another generation worker scored are kept apart: on devices that share something (cores, memory, a power
limit) they take longer, and that is what a tail pays for fusion. Of every kind of step the median of the iterations
counts, so that two odd ones of five change nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.fitted import DecodeLines, StepTime

PROFILE_WEIGHT: Final = 0.25
"""Of a profiled point beside that of one seen span: it holds the shape where nothing else does."""
MAX_WEIGHT: Final = 10.0
"""Of a kind of step, in spans: noise that lasts is not averaged away by more of them."""
MIN_STEPS: Final = 8
"""A span of fewer is mostly what begins and ends it."""
BESIDE_SHARE: Final = 0.5
"""Of a span, from which on it counts as decoded beside scoring."""
MIN_RATIO, MAX_RATIO = 0.1, 10.0
"""Observed over forecast stays within this: one hung step must not turn every forecast into nonsense."""
PROFILE_CONTEXTS: Final = (64.0, 1024.0)
"""Keys at which a profile's line is kept as points."""


class Decoded(NamedTuple):
    """A span of decode steps: so many `steps` of `rows` samples with `context` keys each took `seconds` in all; during
    `beside` of that time (a share) another generation worker scored."""

    steps: float
    rows: float
    context: float
    seconds: float
    beside: float = 0.0


class SeenStep(NamedTuple):
    """One kind of step in one iteration, as if of `batch` samples, a batch of the profile."""

    batch: int
    octave: int
    """Of the context: it lies between 2^octave and twice that."""
    beside: bool
    context: float
    seconds: float
    """Of one step."""
    spans: int


def grouped(decoded: Iterable[Decoded], profile: DecodeLines) -> tuple[SeenStep, ...]:
    """An iteration's spans by kind of step."""
    groups: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for one in decoded:
        if one.steps < MIN_STEPS or one.seconds <= 0 or one.rows <= 0:
            continue
        batch = min(profile.batches, key=lambda known: abs(math.log(known / one.rows)))
        context = max(1.0, one.context)
        as_if = profile.seconds(batch, context) / max(1e-12, profile.seconds(one.rows, context))
        key = batch, int(math.log2(context)), one.beside >= BESIDE_SHARE
        groups.setdefault(key, []).append((context, as_if * one.seconds / one.steps))
    return tuple(
        SeenStep(*key, statistics.fmean(context for context, _ in spans), _median(s for _, s in spans), len(spans))
        for key, spans in sorted(groups.items())
    )


class Refitted(NamedTuple):
    """Decode steps as they are now."""

    lines: DecodeLines
    """Of steps while no other generation worker scores."""
    beside: float
    """How many times as long they take while one does; at least 1: company makes nothing faster."""
    level: float
    """Seen over profiled seconds, all in all."""


def refitted(profile: DecodeLines, iterations: Sequence[Sequence[SeenStep]]) -> Refitted:
    """What was seen of the last iterations; nothing: the profile as it is."""
    kinds = _kinds(profile, iterations)
    alone = [one for one in kinds if not one.beside]
    if not kinds:
        return Refitted(profile, 1.0, 1.0)
    level = _median(_ratio(one, profile) for one in alone or kinds)
    lines = _fitted(profile, level, alone)
    company = [_ratio(one, lines) for one in kinds if one.beside for _ in range(min(int(MAX_WEIGHT), one.spans))]
    beside = _median(company) if company and alone else 1.0
    return Refitted(lines, beside, level) if beside > 1 else Refitted(_fitted(profile, level, kinds), 1.0, level)


def _fitted(profile: DecodeLines, level: float, kinds: Sequence[SeenStep]) -> DecodeLines:
    """Through what was seen, and loosely through the profile at this level."""
    points = [
        StepTime(batch, int(context), level * profile.seconds(batch, context))
        for batch in profile.batches
        for context in PROFILE_CONTEXTS
    ]
    points += [StepTime(one.batch, round(one.context), one.seconds) for one in kinds]
    weights = [PROFILE_WEIGHT] * (len(points) - len(kinds)) + [min(MAX_WEIGHT, one.spans) for one in kinds]
    return DecodeLines.fitted(points, weights)


def _kinds(profile: DecodeLines, iterations: Sequence[Sequence[SeenStep]]) -> list[SeenStep]:
    """Of every kind of step the median iteration, never further from the profile than the limits."""
    seen: dict[tuple[int, int, bool], list[SeenStep]] = {}
    for iteration in iterations:
        for one in iteration:
            seen.setdefault((one.batch, one.octave, one.beside), []).append(one)
    answer = []
    for _, own in sorted(seen.items()):
        context = statistics.fmean(one.context for one in own)
        ratio = min(MAX_RATIO, max(MIN_RATIO, _median(_ratio(one, profile) for one in own)))
        seconds = ratio * profile.seconds(own[0].batch, context)
        answer.append(own[0]._replace(context=context, seconds=seconds, spans=sum(one.spans for one in own)))
    return answer


def _ratio(one: SeenStep, lines: DecodeLines) -> float:
    return one.seconds / max(1e-12, lines.seconds(one.batch, one.context))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
