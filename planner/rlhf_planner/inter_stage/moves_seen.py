"""What moves with KV caches really took in the last iterations, and the lines over their tokens that follow from it.

Rule: a move takes something whatever it carries (step boundaries, messages) and something for every token that it
carries (the link), and the two go wrong apart: links differ by orders of magnitude from what was assumed of them. So
both are fitted to single moves, least squares of what each is off by relatively, loosely held to the shape of the
profile, for where all samples are about as long nothing tells the two apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.fitted import non_negative

MAX_MOVES: Final = 32
"""Of an iteration and kind that are kept, evenly chosen: more tell nothing new."""
PROFILE_WEIGHT: Final = 0.25
"""Of the profile's shape at the shortest and the longest move, beside that of one seen move."""
LITTLE: Final = 0.2
"""Relative error from which on a move pulls no more than this: about what a busy machine makes of equal moves."""
ROUNDS: Final = 20
"""Of reweighting, which ends about there."""


class SeenMove(NamedTuple):
    """Samples that moved together."""

    paused: bool
    """Whether `seconds` are those in which nobody decoded them; else until they were with their destination."""
    waits: float
    """Times that the fixed part was paid."""
    tokens: float
    """Of all of them together."""
    seconds: float


class Line(NamedTuple):
    """Seconds of a move: `fixed + tokens * per_token`."""

    fixed: float
    per_token: float

    def seconds(self, waits: float, tokens: float) -> float:
        """Of so many fixed parts, and so many tokens."""
        return waits * self.fixed + tokens * self.per_token


def sampled(moves: Iterable[SeenMove]) -> tuple[SeenMove, ...]:
    """An iteration's moves, of either kind as many as are kept."""
    listed, answer = list(moves), list[SeenMove]()
    for paused in (False, True):
        own = [one for one in listed if one.paused == paused and one.waits > 0 and one.seconds > 0]
        answer += own[:: max(1, -(-len(own) // MAX_MOVES))]
    return tuple(answer)


def fitted_line(profile: Line, seen: Sequence[SeenMove]) -> Line:
    """What was seen; nothing: the profile as it is."""
    if not seen:
        return profile
    level = statistics.median(one.seconds / profile.seconds(one.waits, one.tokens) for one in seen)
    line = Line(level * profile.fixed, level * profile.per_token)
    each = [one.tokens / one.waits for one in seen]
    shape = [SeenMove(False, 1, tokens, line.seconds(1, tokens)) for tokens in (min(each), max(each))]
    counts = np.array([1.0] * len(seen) + [PROFILE_WEIGHT] * len(shape))
    features = np.array([[one.tokens, one.waits] for one in (*seen, *shape)])
    seconds = np.array([one.seconds for one in (*seen, *shape)])
    for _ in range(ROUNDS):
        expected = features @ (line.per_token, line.fixed)
        off = np.abs(seconds / expected - 1)
        pull = counts * np.minimum(1.0, LITTLE / np.maximum(off, LITTLE)) * (seconds / expected) ** 2
        per_token, fixed = non_negative(features, seconds, pull)
        line = Line(fixed, per_token)
    return line
