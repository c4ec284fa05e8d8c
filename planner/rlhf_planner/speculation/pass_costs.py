"""Learns the time of passes and of drafting from the steps, in seconds. Rule: immutable.

A pass costs a piecewise linear time by width, plus a cost per key and a cost of verifying drafts. Unknown costs are
assumed to be low, so that they are tried.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KNOTS_A_DOUBLING: Final = 4
"""Knots per doubling of the width."""
MEMORY: Final = 0.998
"""Weight of earlier observations after each step: a window of five hundred."""
SMOOTHNESS: Final = 0.5
"""Weight of a knot's neighbours relative to one step of its own."""
ANCHOR: Final = 1e-4
"""Weight of the cost that is assumed before any observation."""
WIDTH_SHARE: Final = 0.15
"""Share of the assumed cost that grows with width."""
RELUCTANCE: Final = 0.05
"""Weight of "keys and verifying cost nothing" relative to observations."""
SURPRISE: Final = 1.5
"""Maximum ratio of a step's time to the expectation that a single step may contribute."""
OFTEN: Final = 48
"""Number of first observations, each of which is followed by a new fit."""
SELDOM: Final = 32
"""Maximum observations between later fits."""
RIDGE: Final = 1e-3
"""Weight of "it costs nothing" relative to observations of a drafter."""
KEYS, VERIFYING = -2, -1
"""Columns after the knots: thousands of keys, and whether drafts were verified."""
KEYS_UNIT: Final = 1000.0


def knots_to(width: int) -> Floats:
    """Return widths float64 [k] from 1 to at least `width`, about KNOTS_A_DOUBLING per doubling."""
    knots = list(range(1, 2 * KNOTS_A_DOUBLING + 1))
    while knots[-1] < width:
        base = 1 << (knots[-1].bit_length() - 1)
        knots.append(knots[-1] + base // KNOTS_A_DOUBLING)
    return np.array(knots, np.float64)


@dataclass(frozen=True)
class PassCosts:
    """Sums of a damped least-squares fit, and the resulting cost at each knot."""

    widths: Ints
    """int64 [rows + 1]: width of a pass by number of rows; non-decreasing."""
    knots: Floats
    products: Floats
    """float64 [k + 2, k + 2] sums of products."""
    targets: Floats
    """float64 [k + 2] sums of products with the time."""
    steps: int
    fitted: Floats
    """float64 [k + 2]: cost at each knot, per thousand keys, and of verifying; zeros before the first step."""
    widest: int
    """Width of the widest observed pass."""
    scale: tuple[float, float]
    """Damped means of observed (width, seconds)."""

    @classmethod
    def unknown(cls, widths: Ints) -> "PassCosts":
        """Return costs without observations, for passes whose width by rows is `widths` (index 0 is not used)."""
        knots = knots_to(int(widths[-1]))
        size = len(knots) + 2
        return cls(widths, knots, np.zeros((size, size)), np.zeros(size), 0, np.zeros(size), 0, (0.0, 0.0))

    @property
    def measured(self) -> bool:
        """Whether a step was observed."""
        return self.steps > 0

    def observed(self, rows: int, keys: int, verifying: bool, seconds: float) -> "PassCosts":
        """Return the costs with a step of `rows` rows that read `keys` keys in total and took `seconds` above 0."""
        width = int(self.widths[min(rows, len(self.widths) - 1)])
        if self.measured:
            # Other work on the machine may have slowed it down. A pass that really takes longer shows it again.
            seconds = min(seconds, SURPRISE * self.predicted(rows, keys, verifying))
        terms = [*self._terms(width), (KEYS, keys / KEYS_UNIT), (VERIFYING, float(verifying))]
        weight = 1.0 / seconds**2
        products, targets = self.products * MEMORY, self.targets * MEMORY
        for column, value in terms:
            targets[column] += weight * seconds * value
            for other, factor in terms:
                products[column, other] += weight * value * factor
        share = max(1.0 / (self.steps + 1), 1.0 - MEMORY)
        scale = (
            self.scale[0] + share * (width - self.scale[0]),
            self.scale[1] + share * (seconds - self.scale[1]),
        )
        seen = PassCosts(
            self.widths,
            self.knots,
            products,
            targets,
            self.steps + 1,
            self.fitted,
            max(self.widest, width),
            scale,
        )
        due = seen.steps <= OFTEN or seen.steps % SELDOM == 0 or width > self.widest
        return seen._with_fit() if due else seen

    def predicted(self, rows: int, keys: int, verifying: bool) -> float:
        """Return the expected seconds of a pass over `rows` rows, including drafted ones."""
        by_width = float(self._by_rows[min(rows, len(self.widths) - 1)])
        return max(
            by_width + float(self.fitted[KEYS]) * keys / KEYS_UNIT + float(self.fitted[VERIFYING]) * verifying, 1e-9
        )

    def seconds(self, rows: int, more: int, keys: int) -> Floats:
        """Return float64 [more + 1]: expected seconds of a pass over `rows` rows and 0 .. `more` drafted ones.

        `keys` are those of the rows without drafts; a drafted row reads as many keys as any other.
        """
        by_width = self._by_rows
        last = len(by_width) - 1
        cost: Floats = by_width[np.minimum(np.arange(rows, rows + more + 1), last)]
        cost = cost + self.fitted[KEYS] * (keys / KEYS_UNIT) * np.arange(rows, rows + more + 1) / max(rows, 1)
        cost[1:] += self.fitted[VERIFYING]
        floor = 1e-9
        bounded: Floats = np.maximum(cost, floor)
        return bounded

    @cached_property
    def _by_rows(self) -> Floats:
        by_rows: Floats = np.interp(self.widths, self.knots, self.fitted[:KEYS])
        return by_rows

    def _terms(self, width: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return (knot, weight) of the two knots around a width."""
        at = min(int(self.knots.searchsorted(width, side="right")), len(self.knots) - 1)
        low, high = float(self.knots[at - 1]), float(self.knots[at])
        share = min(max((width - low) / (high - low), 0.0), 1.0)
        return (at - 1, 1.0 - share), (at, share)

    def _with_fit(self) -> "PassCosts":
        products, targets = self.products.copy(), self.targets.copy()
        size = len(self.knots)
        width, seconds = self.scale
        unit = 1.0 / seconds**2
        # Regularize each knot to the line through its neighbours, and to the cost assumed before any observation.
        left, middle, right = self.knots[:-2], self.knots[1:-1], self.knots[2:]
        share = (middle - left) / (right - left)
        bend = np.zeros((size - 2, size))
        index = np.arange(size - 2)
        bend[index, index], bend[index, index + 1], bend[index, index + 2] = share - 1, 1.0, -share
        products[:size, :size] += SMOOTHNESS * unit * bend.T @ bend
        guess = seconds * (1 - WIDTH_SHARE + WIDTH_SHARE * self.knots / width)
        anchor = ANCHOR * seconds**2 / guess**2 * unit
        products[np.arange(size), np.arange(size)] += anchor
        targets[:size] += anchor * guess
        for extra in (KEYS, VERIFYING):
            products[extra, extra] += RELUCTANCE * max(products[extra, extra], unit)
        fitted: Floats = np.linalg.solve(products, targets).astype(np.float64)
        if fitted[KEYS] < 0 or fitted[VERIFYING] < 0:
            retained = np.ones(len(targets), bool)
            retained[[KEYS, VERIFYING]] = fitted[[KEYS, VERIFYING]] >= 0
            fitted = np.zeros(len(targets))
            fitted[retained] = np.linalg.solve(products[np.ix_(retained, retained)], targets[retained])
            fitted[[KEYS, VERIFYING]] = np.maximum(fitted[[KEYS, VERIFYING]], 0.0)
        fitted[:KEYS] = _never_falling(fitted[:KEYS], np.diag(self.products)[:KEYS] + ANCHOR * unit)
        return PassCosts(
            self.widths, self.knots, self.products, self.targets, self.steps, fitted, self.widest, self.scale
        )


@dataclass(frozen=True)
class DraftCosts:
    """Costs of each drafter for `requests` drafts of at most `length` tokens: a damped least-squares fit."""

    products: Floats
    """float64 [drafters, 3, 3] sums of products over (1, length, requests x length)."""
    targets: Floats
    """float64 [drafters, 3] sums of products with the time."""
    fitted: Floats
    """float64 [drafters, 3] seconds per (1, length, requests x length); zeros before any observation."""
    seen: tuple[int, ...]
    """Number of observations by drafter."""

    @classmethod
    def unknown(cls, drafters: int) -> "DraftCosts":
        """Return costs without observations: drafting is assumed to be free, so that it is tried."""
        return cls(np.zeros((drafters, 3, 3)), np.zeros((drafters, 3)), np.zeros((drafters, 3)), (0,) * drafters)

    def observed(self, drafter: int, requests: int, length: int, seconds: float) -> "DraftCosts":
        """Return the costs with one observation of a drafter."""
        row = np.array([1.0, length, requests * length])
        weight = 1.0 / max(seconds, 1e-9) ** 2
        products, targets, fitted = self.products.copy(), self.targets.copy(), self.fitted
        seen = tuple(count + (index == drafter) for index, count in enumerate(self.seen))
        products[drafter] = products[drafter] * MEMORY + weight * np.outer(row, row)
        targets[drafter] = targets[drafter] * MEMORY + weight * seconds * row
        if seen[drafter] <= OFTEN or seen[drafter] % SELDOM == 0:
            fitted = fitted.copy()
            ridge = np.diag(np.diag(products[drafter]) * RIDGE)
            fitted[drafter] = np.maximum(np.linalg.solve(products[drafter] + ridge, targets[drafter]), 0.0)
        return DraftCosts(products, targets, fitted, seen)

    def seconds(self, drafter: int, requests: int, length: int) -> float:
        """Return the expected seconds of a drafter."""
        fixed, by_length, by_token = self.fitted[drafter].tolist()
        return float(fixed + by_length * length + by_token * requests * length)


def _never_falling(values: Floats, weights: Floats) -> Floats:
    """Return the nearest non-decreasing curve: decreasing neighbours are set to their weighted mean."""
    pools: list[tuple[float, float, int]] = []
    """(mean, weight, knots), means rising."""
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, many = pools.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, count = heavy + total, count + many
        pools.append((mean, total, count))
    means, _, counts = zip(*pools, strict=True)
    curve: Floats = np.maximum(np.repeat(np.array(means), counts), 1e-9)
    return curve
