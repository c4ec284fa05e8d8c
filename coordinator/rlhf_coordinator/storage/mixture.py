"""The order of prompts from several sources: the source of the n-th prompt, and its index in the source. Rule: pure.

Each turn of a cycle goes to the source whose next turn is due first (earliest deadline first).
"""

from collections.abc import Sequence
from math import gcd


class Mixture:
    """Turns of sources with integer weights from 1."""

    def __init__(self, weights: Sequence[int]) -> None:
        common = gcd(*weights)
        self._weights = [weight // common for weight in weights]
        self._turns = _cycle(self._weights)
        self._ranks: list[int] = []
        seen = [0] * len(weights)
        for source in self._turns:
            self._ranks.append(seen[source])
            seen[source] += 1

    def place(self, number: int) -> tuple[int, int]:
        """Return (source, index in the source, from 0) of the prompt with a number from 0."""
        cycles, turn = divmod(number, len(self._turns))
        source = self._turns[turn]
        return source, cycles * self._weights[source] + self._ranks[turn]

    def counts(self, count: int) -> list[int]:
        """Return the numbers of prompts from each source among the first `count`."""
        cycles, rest = divmod(count, len(self._turns))
        result = [cycles * weight for weight in self._weights]
        for source in self._turns[:rest]:
            result[source] += 1
        return result


def _cycle(weights: Sequence[int]) -> list[int]:
    """Return the source of each turn of a cycle."""
    total = sum(weights)
    taken = [0] * len(weights)
    turns = []
    for turn in range(total):
        begun = (source for source, weight in enumerate(weights) if taken[source] * total < (turn + 1) * weight)
        source = min(begun, key=lambda index: (-(-(taken[index] + 1) * total // weights[index]), index))
        turns.append(source)
        taken[source] += 1
    return turns
