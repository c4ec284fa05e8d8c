"""Observed moves with KV caches in the last iterations, and the cost lines fitted to them.

A move has a fixed part and a part per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.fitted_costs import non_negative

MOVE_STEPS: Final = 5
"""Assumed number of step boundaries that a move waits for."""
PAUSE_STEPS: Final = 2
"""Assumed number of step boundaries in which no worker decodes the sample."""
LAST_TOKENS: Final = 16
"""Assumed number of cache positions that are sent while no worker decodes the sample."""
MAX_MOVES: Final = 32
"""Maximum moves stored per iteration and kind, evenly selected."""
PROFILE_WEIGHT: Final = 0.25
"""Weight of the profile's shape at the shortest and the longest move. An observed move has weight 1."""
MAX_PULL_ERROR: Final = 0.2
"""Relative error above which a move's influence stops growing."""
REWEIGHTINGS: Final = 20
"""Rounds of reweighting."""


class ObservedMove(NamedTuple):
    """Samples that moved together."""

    paused: bool
    """Whether `seconds` is the pause in which no worker decoded them. Otherwise it is the whole move."""
    waits: float
    """Number of times that the fixed part was paid."""
    tokens: float
    """Total tokens of all samples."""
    seconds: float


class MoveLine(NamedTuple):
    """Seconds of a move: `fixed + tokens * per_token`."""

    fixed: float
    per_token: float

    def seconds(self, waits: float, tokens: float) -> float:
        """Return the seconds of `waits` fixed parts and `tokens` tokens."""
        return waits * self.fixed + tokens * self.per_token


def assumed_lines(setup: float, step: float, sent: float, move_steps: float) -> tuple[MoveLine, MoveLine]:
    """Return the lines of (a whole move, its pause) that are assumed before any move was observed.

    `setup`, `step` and `sent` are the seconds of messages, of a decode step and of sending one token.
    """
    pause = setup + LAST_TOKENS * sent + min(PAUSE_STEPS, move_steps) * step
    return MoveLine(setup + move_steps * step, sent), MoveLine(pause, 0.0)


def kept_moves(moves: Iterable[ObservedMove]) -> tuple[ObservedMove, ...]:
    """Return at most MAX_MOVES of each kind of an iteration's moves that took time."""
    candidates, retained = list(moves), list[ObservedMove]()
    for paused in (False, True):
        of_kind = [move for move in candidates if move.paused == paused and move.waits > 0 and move.seconds > 0]
        retained += of_kind[:: max(1, -(-len(of_kind) // MAX_MOVES))]
    return tuple(retained)


def fit_move_line(profile: MoveLine, observed: Sequence[ObservedMove]) -> MoveLine:
    """Return the line fitted to the observed moves; the profile if there are none."""
    if not observed:
        return profile
    level = statistics.median(move.seconds / profile.seconds(move.waits, move.tokens) for move in observed)
    line = MoveLine(level * profile.fixed, level * profile.per_token)
    tokens_per_wait = [move.tokens / move.waits for move in observed]
    ends = (min(tokens_per_wait), max(tokens_per_wait))
    shape = [ObservedMove(False, 1, tokens, line.seconds(1, tokens)) for tokens in ends]
    points = (*observed, *shape)
    counts = np.array([1.0] * len(observed) + [PROFILE_WEIGHT] * len(shape))
    features = np.array([[move.tokens, move.waits] for move in points])
    seconds = np.array([move.seconds for move in points])
    for _ in range(REWEIGHTINGS):
        expected = features @ (line.per_token, line.fixed)
        errors = np.abs(seconds / expected - 1)
        pull = counts * np.minimum(1.0, MAX_PULL_ERROR / np.maximum(errors, MAX_PULL_ERROR)) * (seconds / expected) ** 2
        per_token, fixed = non_negative(features, seconds, pull)
        line = MoveLine(fixed, per_token)
    return line
