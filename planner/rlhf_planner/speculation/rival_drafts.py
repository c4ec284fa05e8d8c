"""Learns whose draft to follow if several drafters have one, from their drafts for the same places. Rule: immutable."""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_planner.speculation.acceptance import KEPT_AT_UPDATE, WINDOW

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR_PLACES: Final = 4.0
"""Places that the expectation of each draft counts for."""


class PairwiseCounts(NamedTuple):
    """Pairs of drafts for the same places, int64 [n] each: drafters, matches, and the known lead of the first in right
    tokens.
    """

    first: Ints
    first_matches: Ints
    second: Ints
    second_matches: Ints
    ahead: Ints


@dataclass(frozen=True)
class RivalDrafts:
    """Sums float64 [drafters, drafters, matches, matches] by pair of drafters and matches.

    `ahead` is the tokens by which the first drafter was ahead, `places` the number of places.
    """

    ahead: Floats
    places: Floats

    @classmethod
    def unknown(cls, drafters: int, matches: int) -> "RivalDrafts":
        """Return empty sums."""
        shape = (drafters, drafters, matches, matches)
        return cls(np.zeros(shape), np.zeros(shape))

    def observed(self, duels: PairwiseCounts) -> "RivalDrafts":
        """Return the sums with pairs of drafts."""
        ahead, places = self.ahead.copy(), self.places.copy()
        cells = (duels.first, duels.second, duels.first_matches, duels.second_matches)
        mirrored = (duels.second, duels.first, duels.second_matches, duels.first_matches)
        for where, lead in ((cells, duels.ahead), (mirrored, -duels.ahead)):
            np.add.at(ahead, where, lead)
            np.add.at(places, where, 1.0)
        over = np.maximum(places / WINDOW, 1.0)
        return RivalDrafts(ahead / over, places / over)

    def aged(self, share: float = KEPT_AT_UPDATE) -> "RivalDrafts":
        """Return sums weighted by `share` (0 .. 1), because the policy changed."""
        return replace(self, ahead=self.ahead * share, places=self.places * share)

    def winner(self, drafters: Ints, matches: Ints, lengths: Ints, expected: Floats) -> Ints:
        """Return int64 [n]: which of k drafts to follow for each of n requests.

        `drafters` are [k]; `matches`, `lengths` in tokens and `expected` right tokens are [k, n].
        """
        place = np.arange(lengths.shape[1])
        winner = np.zeros(lengths.shape[1], np.int64)
        for at in range(1, len(drafters)):
            cell = (drafters[at], drafters[winner], matches[at], matches[winner, place])
            alone = expected[at] - expected[winner, place]
            lead = (self.ahead[cell] + PRIOR_PLACES * alone) / (self.places[cell] + PRIOR_PLACES)
            better = (lengths[at] > 0) & ((lead > 0) | (lengths[winner, place] == 0))
            winner = np.where(better, at, winner)
        return winner
