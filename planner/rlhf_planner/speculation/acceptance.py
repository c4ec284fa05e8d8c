"""How far drafts are right: counts by drafter, match and position, from which the survival of a drafted token follows.

Rule: counts of tokens that were judged and of those accepted, never a ratio alone. A cell with few counts takes after
the rest of its match, a match after the rest of its drafter, and a drafter of which nothing is known is right every
other time: optimistic, so that it is tried. What was seen of a cell is never counted twice: a dozen unlucky tokens at
the beginning would end a drafter. Counts of a cell are damped to a window, so what was long ago ends, and `aged`
shortens it where the policy changes. Pure and immutable: what is observed makes a new value.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOW: Final = 128.0
"""Judged tokens that a cell remembers: its rate is then known to 4%, and unlearned by a few dozen probes."""
PRIOR_TRIALS: Final = 4.0
"""Tokens that the rate one level above counts for."""
PRIOR_RATE: Final = 0.5
"""Of a drafter before anything was seen of it."""
KEPT_AT_UPDATE: Final = 0.5
"""Share of the counts that outlives an update of the policy's weights: it changes little of what a policy says."""


@dataclass(frozen=True)
class Acceptance:
    """Counts float64 [drafters, matches, positions]: tokens that were judged, and those of them that were accepted."""

    judged: Floats
    accepted: Floats

    @classmethod
    def unknown(cls, drafters: int, matches: int, positions: int) -> "Acceptance":
        """Return counts of nothing."""
        shape = (drafters, matches, positions)
        return cls(np.zeros(shape), np.zeros(shape))

    def observed(self, drafters: Ints, matches: Ints, drafted: Ints, accepted: Ints) -> "Acceptance":
        """Return the counts with outcomes [n]: of `drafted` tokens the first `accepted` were right.

        The token after them was judged wrong; those behind it were not judged.
        """
        if not len(drafters):
            return self
        cells = drafters * self.judged.shape[1] + matches
        judged = self.judged + tokens_of(cells, np.minimum(accepted + 1, drafted), self.judged.shape)
        right = self.accepted + tokens_of(cells, accepted, self.judged.shape)
        over = np.maximum(judged / WINDOW, 1.0)
        return Acceptance(judged / over, right / over)

    def aged(self, kept: float = KEPT_AT_UPDATE) -> "Acceptance":
        """Return counts that weigh `kept` (0 .. 1) of what they did: the policy changed."""
        return replace(self, judged=self.judged * kept, accepted=self.accepted * kept)

    @cached_property
    def rates(self) -> Floats:
        """Float64 [drafters, matches, positions]: the chance that a token is right where all before it were."""
        whole_judged, whole = self.judged.sum(axis=(1, 2), keepdims=True), self.accepted.sum(axis=(1, 2), keepdims=True)
        match_judged, match = self.judged.sum(axis=2, keepdims=True), self.accepted.sum(axis=2, keepdims=True)
        of_drafter = _shrunk(whole - match, whole_judged - match_judged, np.float64(PRIOR_RATE))
        of_match = _shrunk(match - self.accepted, match_judged - self.judged, of_drafter)
        return _shrunk(self.accepted, self.judged, of_match)

    @cached_property
    def survival(self) -> Floats:
        """Float64 [drafters, matches, positions]: the chance that a token and all before it are right; it falls."""
        survival: Floats = np.cumprod(self.rates, axis=2).astype(np.float64)
        return survival

    def written(self) -> dict[str, Any]:
        """Return the counts as plain data, for a file."""
        return {"judged": self.judged.tolist(), "accepted": self.accepted.tolist()}

    @classmethod
    def read(cls, data: Any, like: "Acceptance") -> "Acceptance":
        """Return written counts. Raises ValueError for what is not counts of the shape of `like`."""
        try:
            judged, accepted = (np.asarray(data[name], np.float64) for name in ("judged", "accepted"))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"counts of acceptance cannot be read: {error}") from None
        if judged.shape != like.judged.shape or accepted.shape != like.judged.shape:
            raise ValueError(f"counts of acceptance are {judged.shape}, must be {like.judged.shape}")
        if not (np.isfinite(judged).all() and (accepted >= 0).all() and (accepted <= judged).all()):
            raise ValueError("counts of acceptance must be finite, with accepted from 0 to judged")
        over = np.maximum(judged / WINDOW, 1.0)
        return cls(judged / over, accepted / over)


def tokens_of(cells: Ints, lengths: Ints, shape: tuple[int, ...]) -> Floats:
    """Return float64 of `shape`, [drafters, matches, positions]: how many drafts [n] have a token there.

    `cells` says of which drafter and match a draft is, drafter x matches + match; `lengths` how many tokens it has.
    """
    positions = shape[-1]
    ends = cells * (positions + 1) + np.minimum(lengths, positions)
    drafts = np.bincount(ends, minlength=shape[0] * shape[1] * (positions + 1)).reshape(*shape[:2], positions + 1)
    longer: Floats = drafts[..., :0:-1].cumsum(axis=-1)[..., ::-1].astype(np.float64)
    return longer


def _shrunk(accepted: Floats, judged: Floats, prior: Any) -> Floats:
    # Differences of sums: at worst a rounding error below zero.
    accepted, judged = np.maximum(accepted, 0.0), np.maximum(judged, 0.0)
    rate: Floats = (accepted + PRIOR_TRIALS * prior) / (judged + PRIOR_TRIALS)
    return rate
