"""Chooses how many drafted tokens to verify per sample: the (sample, position) slots with the highest survival that
pay.

Survival is the probability that a token and all before it are accepted. Rule: pure.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Best(NamedTuple):
    """The best number of drafted tokens in a pass."""

    slots: int
    """At least 1 if drafts pay, even if fewer are expected on average; 0 if a plain step is at least as fast."""
    tokens: float
    """Expected tokens of the step: one per sample, plus accepted tokens of drafts."""
    seconds: float
    """Seconds of the step, including drafting."""


def best_slots(rows: int, survival: Floats, seconds: Floats, drafting: float, plain: float) -> Best:
    """Return the best j of 0 .. n slots with survival [n], non-increasing; the smallest on a tie.

    `seconds` [n + 1 or more] is a pass with 0, 1, ... drafted rows, `plain` a step without drafts. `drafting` is added
    for j above 0.
    """
    if not len(survival):
        return Best(0, float(rows), plain)
    tokens = rows + np.cumsum(survival)
    took = drafting + seconds[1 : len(survival) + 1]
    at = int(np.argmax(tokens / took))
    if tokens[at] * plain <= rows * took[at]:
        return Best(0, float(rows), plain)
    return Best(at + 1, float(tokens[at]), float(took[at]))


def best_of_supply(rows: int, survival: Floats, supply: Floats, seconds: Floats, drafting: float) -> Best:
    """Return the best number of slots for expected drafts: `supply` slots, on average, of each survival.

    Both arrays have the same shape.
    """
    counts, gained = supply_curve(survival, supply)
    most = min(counts[-1], len(seconds) - 1.0)
    slots = np.concatenate([counts[(counts > 0) & (counts <= most)], np.arange(1.0, most + 1e-9)])
    plain = float(seconds[0])
    if not len(slots):
        return Best(0, float(rows), plain)
    tokens = rows + np.interp(slots, counts, gained)
    took = drafting + np.interp(slots, np.arange(len(seconds)), seconds)
    at = int(np.argmax(tokens / took))
    if tokens[at] * plain <= rows * took[at]:
        return Best(0, float(rows), plain)
    return Best(max(1, round(float(slots[at]))), float(tokens[at]), float(took[at]))


def supply_curve(survival: Floats, supply: Floats) -> tuple[Floats, Floats]:
    """Return rising numbers of slots from 0, and the expected accepted tokens of the best so many slots."""
    used = np.flatnonzero(supply > 0)
    order = used[np.argsort(-survival.ravel()[used], kind="stable")]
    counts = np.concatenate([[0.0], supply.ravel()[order].cumsum()])
    gained = np.concatenate([[0.0], (supply.ravel()[order] * survival.ravel()[order]).cumsum()])
    return counts, gained


def lengths_of(survival: Floats, offered: Ints, slots: int) -> Ints:
    """Return int64 [n]: the tokens to take from each draft, `slots` in total, or all that are offered.

    `survival` is [n, positions]; `offered` [n] counts each draft's tokens.
    """
    if slots <= 0 or not len(offered):
        return np.zeros(len(offered), np.int64)
    positions = survival.shape[1]
    there = np.arange(positions) < offered[:, None]
    if slots >= int(there.sum()):
        return np.minimum(offered, positions)
    values = np.where(there, survival, -1.0)
    # Position by position, so that equal slots are taken from the beginning of a draft.
    order = np.argsort(-values.T.ravel(), kind="stable")[:slots]
    return np.bincount(order % len(offered), minlength=len(offered))
