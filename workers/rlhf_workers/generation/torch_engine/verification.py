"""Decides which tokens of a pass over several positions of a sample count. Pure array arithmetic.

Rule: a position counts if all tokens before it belong to the sample: each was known, or is a draft that equals the
token drawn in its place.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_workers.generation.torch_engine.response_table import Slots

Tokens = npt.NDArray[np.int64]


class KeptTokens(NamedTuple):
    """Result of a pass."""

    positions: Slots
    """Positions by which each sample advances, at least 1, [n]."""
    accepted: Slots
    """Accepted drafted tokens, [n]."""


def verdict(drawn: Tokens, drafted: npt.NDArray[np.int32], known_counts: Slots, counts: Slots) -> KeptTokens:
    """Return the tokens that count in n samples' rows.

    `drawn` [n, most] was drawn at each position and `drafted` [n, most] fed to the next one; the first `counts` [n]
    rows are a sample's own, of which the first `known_counts` [n] have a known token.
    """
    ahead = np.arange(drawn.shape[1])
    forced = ahead < known_counts[:, None]
    alike = (forced | (drawn == drafted)) & (ahead < counts[:, None] - 1)
    positions = 1 + np.cumprod(alike, axis=1).sum(axis=1)
    return KeptTokens(positions, np.maximum(positions - 1 - known_counts, 0))


def cut_at_ends(
    verdict: KeptTokens, ends: npt.NDArray[np.bool_], known_counts: Slots
) -> tuple[KeptTokens, npt.NDArray[np.bool_]]:
    """Return the verdict up to the first new token that `ends` [n, most] a response, and which samples [n] end."""
    ahead = np.arange(ends.shape[1])
    ends = np.logical_and(ends, (ahead >= known_counts[:, None]) & (ahead < verdict.positions[:, None]))
    ended: npt.NDArray[np.bool_] = np.any(ends, axis=1)
    positions = np.where(ended, ends.argmax(axis=1) + 1, verdict.positions)
    return KeptTokens(positions, np.minimum(verdict.accepted, np.maximum(positions - known_counts, 0))), ended
