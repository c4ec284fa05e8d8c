"""Updates costs with the work of one more iteration.

Rule: compares observed work with the profile's time for the same work, never with a simulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.costs import MOVES_AT_ONCE, Kind, StageCosts
from rlhf_planner.inter_stage.observed_moves import ObservedMove, kept_moves
from rlhf_planner.inter_stage.observed_steps import MAX_RATIO, MIN_RATIO, DecodedSteps, group_steps

OBSERVATIONS: Final = 5
"""Iterations that count. One iteration replaces a wrong profile, and two of five may be outliers."""


class ObservedWork(NamedTuple):
    """Observed work: `passes` passes over `batch` samples of `tokens` tokens each took `seconds` in total.

    `contended` is the share of that time, 0..1, in which another generation worker scored. Decode passes are steps, and
    their tokens are keys. Transfer and pause passes are samples that moved with their caches.
    """

    kind: Kind
    passes: float
    batch: float
    tokens: float
    seconds: float
    contended: float = 0.0


def refined(costs: StageCosts, observed: Iterable[ObservedWork]) -> StageCosts:
    """Return these costs after one more iteration's work. Kinds of work that were not observed stay unchanged."""
    work = list(observed)
    ratios = dict(costs.ratios)
    for kind, ratio in _ratios(dataclasses.replace(costs, ratios={}, steps=(), moves=()), work):
        ratios[kind] = (*ratios.get(kind, ()), ratio)[-OBSERVATIONS:]
    newest = group_steps((_decoded(item) for item in work if item.kind == "decode"), costs.decode)
    steps = (*costs.steps, newest)[-OBSERVATIONS:] if newest else costs.steps
    moved = kept_moves(map(_move, (item for item in work if item.kind in ("transfer", "pause"))))
    moves = (*costs.moves, moved)[-OBSERVATIONS:] if moved else costs.moves
    return dataclasses.replace(costs, ratios=ratios, steps=steps, moves=moves)


def _decoded(work: ObservedWork) -> DecodedSteps:
    return DecodedSteps(work.passes, work.batch, work.tokens, work.seconds, work.contended)


def _move(work: ObservedWork) -> ObservedMove:
    paused = work.kind == "pause"
    waits = work.passes if paused else -(-work.passes // MOVES_AT_ONCE)
    return ObservedMove(paused, waits, work.passes * work.tokens, work.seconds)


def _ratios(profile: StageCosts, observed: Iterable[ObservedWork]) -> Iterable[tuple[Kind, float]]:
    """Yield (kind, ratio within limits) of every observed kind of work except decoding."""
    seconds: dict[Kind, tuple[float, float]] = {}
    for work in observed:
        if work.kind != "decode":
            forecast, measured = seconds.get(work.kind, (0.0, 0.0))
            seconds[work.kind] = (forecast + _forecast(profile, work), measured + work.seconds)
    for kind, (forecast, measured) in seconds.items():
        if forecast > 0 and measured > 0:
            yield kind, min(MAX_RATIO, max(MIN_RATIO, measured / forecast))


def _forecast(profile: StageCosts, work: ObservedWork) -> float:
    """Return the profile's seconds for this work, which is not decoding."""
    match work.kind:
        case "rebuild":
            if profile.replays:
                return work.passes * profile.decode_seconds(max(1, round(work.batch)), work.tokens)
            return work.passes * profile.prefill.seconds(work.batch, work.tokens)
        case "command":
            return work.passes * profile.acknowledged_seconds
        case "pause":
            return work.passes * profile.pause_seconds(work.tokens)
        case "score":
            setup, a_sample, a_token = profile.score_parts
            return work.passes * (setup + work.batch * (a_sample + work.tokens * a_token))
        case _:  # a transfer
            waits = -(-work.passes // MOVES_AT_ONCE)
            return work.passes * work.tokens * profile.link_seconds + waits * profile.move_seconds
