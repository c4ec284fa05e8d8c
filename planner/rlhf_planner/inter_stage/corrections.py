"""Costs after one more iteration: what its work took, over what the profile says of the same work.

Rule: like with like: so many steps of so many rows, passes of so many tokens, moves of so many keys; never a simulation
of them. A ratio is of the profile itself, not of costs that are corrected already, and what counts is the median of the
last few iterations: one hung pass changes nothing. Decode steps and moves are kept as they were seen (`steps_seen`,
`moves_seen`); their ratios are for people to look at. The formulas are in `costs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, NamedTuple

from rlhf_planner.inter_stage.costs import MOVES_AT_ONCE, Kind, StageCosts
from rlhf_planner.inter_stage.moves_seen import SeenMove, sampled
from rlhf_planner.inter_stage.steps_seen import MAX_RATIO, MIN_RATIO, Decoded, grouped

OBSERVATIONS: Final = 5
"""Iterations that count: a wrong profile is gone after one, and of five two may be anything."""


class Observed(NamedTuple):
    """Real work: `passes` over `batch` samples of `tokens` tokens each took `seconds` in all; for a share
    `beside` of them another generation worker scored.

    decode: passes are steps, tokens are keys; rebuild: prefills of samples that are resumed or, where these are decoded
    again, steps over batches with some of them; transfer, pause: passes are samples that moved with their caches;
    command: passes are commands, whatever they are about.
    """

    kind: Kind
    passes: float
    batch: float
    tokens: float
    seconds: float
    beside: float = 0.0


def refined(costs: StageCosts, observed: Iterable[Observed]) -> StageCosts:
    """These costs after one more iteration's work; kinds of which nothing was seen stay as they are."""
    work = list(observed)
    ratios = dict(costs.ratios)
    for kind, ratio in _ratios(dataclasses.replace(costs, ratios={}, steps=(), moves=()), work):
        ratios[kind] = (*ratios.get(kind, ()), ratio)[-OBSERVATIONS:]
    newest = grouped((_decoded(one) for one in work if one.kind == "decode"), costs.decode)
    steps = (*costs.steps, newest)[-OBSERVATIONS:] if newest else costs.steps
    moved = sampled(map(_move, (one for one in work if one.kind in ("transfer", "pause"))))
    moves = (*costs.moves, moved)[-OBSERVATIONS:] if moved else costs.moves
    return dataclasses.replace(costs, ratios=ratios, steps=steps, moves=moves)


def _decoded(one: Observed) -> Decoded:
    return Decoded(one.passes, one.batch, one.tokens, one.seconds, one.beside)


def _move(one: Observed) -> SeenMove:
    paused = one.kind == "pause"
    waits = one.passes if paused else -(-one.passes // MOVES_AT_ONCE)
    return SeenMove(paused, waits, one.passes * one.tokens, one.seconds)


def _ratios(profile: StageCosts, observed: Iterable[Observed]) -> Iterable[tuple[Kind, float]]:
    """Of every kind but decoding, within limits."""
    seconds: dict[Kind, tuple[float, float]] = {}
    for one in observed:
        if one.kind != "decode":
            forecast, measured = seconds.get(one.kind, (0.0, 0.0))
            seconds[one.kind] = (forecast + _forecast(profile, one), measured + one.seconds)
    for kind, (forecast, measured) in seconds.items():
        if forecast > 0 and measured > 0:
            yield kind, min(MAX_RATIO, max(MIN_RATIO, measured / forecast))


def _forecast(profile: StageCosts, work: Observed) -> float:
    """Seconds of this work, which is not decoding."""
    match work.kind:
        case "rebuild":
            if profile.replays:
                return work.passes * profile.decode_seconds(max(1, round(work.batch)), work.tokens)
            return work.passes * profile.prefill.seconds(work.batch, work.tokens)
        case "command":
            return work.passes * profile.told_seconds
        case "pause":
            return work.passes * profile.pause_seconds(work.tokens)
        case "score":
            setup, a_sample, a_token = profile.score_parts
            return work.passes * (setup + work.batch * (a_sample + work.tokens * a_token))
        case _:  # a transfer
            waits = -(-work.passes // MOVES_AT_ONCE)
            return work.passes * work.tokens * profile.link_seconds + waits * profile.move_seconds
