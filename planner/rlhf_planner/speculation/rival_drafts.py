"""Whose draft is followed where several drafters have one, learned from what they said at the same places.

Rule: drafts for one place are compared by how many tokens each of them was right there, also those that were not
followed, by both matches. How often a drafter is right over all places says little of the places where another has a
draft, too: what many siblings agree on, a sample's own text often has longer. Where few places were seen, what is
expected of each draft alone decides. Counts of a pair are damped to a window. Pure and immutable; must never say how
far a draft is followed.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_planner.speculation.acceptance import KEPT_AT_UPDATE, WINDOW

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR_PLACES: Final = 4.0
"""Places that what is expected of each draft alone counts for."""


class PairwiseCounts(NamedTuple):
    """Pairs of drafts for the same places, int64 [n] each: whose they are, on what matches they rest, and by how many
    tokens the first was right for longer, as far as is known."""

    first: Ints
    first_matches: Ints
    second: Ints
    second_matches: Ints
    ahead: Ints


@dataclass(frozen=True)
class RivalDrafts:
    """Sums float64 [drafters, drafters, matches, matches]: of places where the first drafter had a draft of the first
    match and the second one of the second: tokens that the first was ahead, and how many places."""

    ahead: Floats
    places: Floats

    @classmethod
    def unknown(cls, drafters: int, matches: int) -> "RivalDrafts":
        """Return sums of nothing."""
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

    def aged(self, kept: float = KEPT_AT_UPDATE) -> "RivalDrafts":
        """Return sums that weigh `kept` (0 .. 1) of what they did: the policy changed."""
        return replace(self, ahead=self.ahead * kept, places=self.places * kept)

    def winner(self, drafters: Ints, matches: Ints, lengths: Ints, expected: Floats) -> Ints:
        """Return int64 [n]: which of k drafts is followed for each of n requests.

        `drafters` [k] says whose they are, `matches` and `lengths` [k, n] what they rest on and how many tokens they
        have, and `expected` [k, n] how many of them are expected to be right, by each draft alone.
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
