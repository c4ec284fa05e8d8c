"""Learns how often drafts are right: counts by drafter, match and position, and the survival of a drafted token.

Counts are damped to a window, so old ones fade. Rule: immutable.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOW: Final = 128.0
"""Judged tokens that a cell remembers."""
PRIOR_TRIALS: Final = 4.0
"""Tokens that the rate one level above counts for."""
PRIOR_RATE: Final = 0.5
"""Assumed rate of a drafter before any observation."""
KEPT_AT_UPDATE: Final = 0.5
"""Share of the counts that remains after an update of the policy's weights."""


@dataclass(frozen=True)
class Acceptance:
    """Counts float64 [drafters, matches, positions] of judged tokens and of accepted tokens."""

    judged: Floats
    accepted: Floats

    @classmethod
    def unknown(cls, drafters: int, matches: int, positions: int) -> "Acceptance":
        """Return empty counts."""
        shape = (drafters, matches, positions)
        return cls(np.zeros(shape), np.zeros(shape))

    def observed(self, drafters: Ints, matches: Ints, drafted: Ints, accepted: Ints) -> "Acceptance":
        """Return the counts with outcomes [n]: the first `accepted` of `drafted` tokens were right.

        The next drafted token, if any, was judged wrong; tokens after it were not judged.
        """
        if not len(drafters):
            return self
        cells = drafters * self.judged.shape[1] + matches
        judged = self.judged + tokens_of(cells, np.minimum(accepted + 1, drafted), self.judged.shape)
        right = self.accepted + tokens_of(cells, accepted, self.judged.shape)
        over = np.maximum(judged / WINDOW, 1.0)
        return Acceptance(judged / over, right / over)

    def aged(self, share: float = KEPT_AT_UPDATE) -> "Acceptance":
        """Return counts weighted by `share` (0 .. 1), because the policy changed."""
        return replace(self, judged=self.judged * share, accepted=self.accepted * share)

    @cached_property
    def rates(self) -> Floats:
        """Float64 [drafters, matches, positions]: probability that a token is right if all tokens before it were."""
        whole_judged, whole = self.judged.sum(axis=(1, 2), keepdims=True), self.accepted.sum(axis=(1, 2), keepdims=True)
        match_judged, match = self.judged.sum(axis=2, keepdims=True), self.accepted.sum(axis=2, keepdims=True)
        of_drafter = _shrunk(whole - match, whole_judged - match_judged, np.float64(PRIOR_RATE))
        of_match = _shrunk(match - self.accepted, match_judged - self.judged, of_drafter)
        return _shrunk(self.accepted, self.judged, of_match)

    @cached_property
    def survival(self) -> Floats:
        """Float64 [drafters, matches, positions]: probability that a token and all before it are right;
        non-increasing."""
        survival: Floats = np.cumprod(self.rates, axis=2).astype(np.float64)
        return survival

    def written(self) -> dict[str, Any]:
        """Return the counts as plain data, for a file."""
        return {"judged": self.judged.tolist(), "accepted": self.accepted.tolist()}

    @classmethod
    def read(cls, data: Any, like: "Acceptance") -> "Acceptance":
        """Return counts from `written`. Raises ValueError unless they have the shape of `like` and possible values."""
        try:
            judged, accepted = (np.asarray(data[name], np.float64) for name in ("judged", "accepted"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"counts of acceptance cannot be read: {error}") from None
        if judged.shape != like.judged.shape or accepted.shape != like.judged.shape:
            raise ValueError(f"counts of acceptance are {judged.shape}, must be {like.judged.shape}")
        if not (np.isfinite(judged).all() and (accepted >= 0).all() and (accepted <= judged).all()):
            raise ValueError("counts of acceptance must be finite, with accepted from 0 to judged")
        over = np.maximum(judged / WINDOW, 1.0)
        return cls(judged / over, accepted / over)


def tokens_of(cells: Ints, lengths: Ints, shape: tuple[int, ...]) -> Floats:
    """Return the number of drafts [n] that have a token in each cell, float64 of `shape` [drafters, matches,
    positions].

    `cells` is drafter x matches + match of each draft, `lengths` its tokens.
    """
    positions = shape[-1]
    ends = cells * (positions + 1) + np.minimum(lengths, positions)
    drafts = np.bincount(ends, minlength=shape[0] * shape[1] * (positions + 1)).reshape(*shape[:2], positions + 1)
    longer: Floats = drafts[..., :0:-1].cumsum(axis=-1)[..., ::-1].astype(np.float64)
    return longer


def _shrunk(accepted: Floats, judged: Floats, prior: Any) -> Floats:
    # Differences of sums: rounding may give values slightly below zero.
    accepted, judged = np.maximum(accepted, 0.0), np.maximum(judged, 0.0)
    rate: Floats = (accepted + PRIOR_TRIALS * prior) / (judged + PRIOR_TRIALS)
    return rate
