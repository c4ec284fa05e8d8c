"""How far each sample is drafted: the (sample, position) slots that survive most likely, and how many of them pay.

Rule: slots of all samples are sorted by survival, the chance that a token and all before it are accepted; the best j
are taken, j being the one with the most expected tokens a second, and 0 always a candidate. Survival falls along a
draft, so what is taken of a draft is its beginning. Pure; exact: every j is tried.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Best(NamedTuple):
    """The best number of drafted tokens in a pass."""

    slots: int
    """At least 1 where drafts pay, however few are expected on average; 0: a plain step is faster."""
    tokens: float
    """Expected of the step: one of each sample, and those of drafts that are accepted."""
    seconds: float
    """Of the step, drafting included."""


def best_slots(rows: int, survival: Floats, seconds: Floats, drafting: float, plain: float) -> Best:
    """Return the best j of 0 .. n of slots whose survival is [n], falling.

    `seconds` [n + 1 or more] is a pass with 0, 1, ... drafted rows, `drafting` comes with any j above 0, and `plain` is
    what a step without drafts takes. Of equals the smallest is taken.
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
    """Return the same of drafts that are only expected: `supply` slots, on average, of each survival.

    Both have one shape. Tokens and seconds are linear between whole numbers of slots, so one of the ends is the best.
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
    """Return numbers of slots, from 0 on and rising, and the accepted tokens that are expected of the best as many."""
    used = np.flatnonzero(supply > 0)
    order = used[np.argsort(-survival.ravel()[used], kind="stable")]
    counts = np.concatenate([[0.0], supply.ravel()[order].cumsum()])
    gained = np.concatenate([[0.0], (supply.ravel()[order] * survival.ravel()[order]).cumsum()])
    return counts, gained


def lengths_of(survival: Floats, offered: Ints, slots: int) -> Ints:
    """Return int64 [n]: the tokens to take of each draft, `slots` in all.

    `survival` [n, positions] is that of each draft's tokens, `offered` [n] how many it has.
    """
    if slots <= 0 or not len(offered):
        return np.zeros(len(offered), np.int64)
    positions = survival.shape[1]
    there = np.arange(positions) < offered[:, None]
    if slots >= int(there.sum()):
        return np.minimum(offered, positions)
    values = np.where(there, survival, -1.0)
    # Position by position, so that of equal slots the earlier of a draft come first: what is taken is a beginning.
    order = np.argsort(-values.T.ravel(), kind="stable")[:slots]
    return np.bincount(order % len(offered), minlength=len(offered))
