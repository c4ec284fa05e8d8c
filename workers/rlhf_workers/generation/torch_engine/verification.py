"""What a pass over several positions of a sample was fed for: which of the tokens drawn there are the sample's own.

Rule: pure arithmetic over arrays, samples by positions. A position counts when the token before it is the sample's: it
was known, or a draft that equals what was drawn there. So what is kept is what single steps would have drawn, whatever
was drafted, and the first token that differs from its draft is kept too, for it was drawn from the right logits. Must
never look at a row behind the first difference.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_workers.generation.torch_engine.response_table import Slots

Tokens = npt.NDArray[np.int64]


class KeptTokens(NamedTuple):
    """What is kept of a pass."""

    kept: Slots
    """[n] positions that a sample moves on by, at least 1."""
    accepted: Slots
    """[n] drafted tokens among those that were drawn there."""


def verdict(drawn: Tokens, drafted: npt.NDArray[np.int32], known: Slots, counts: Slots) -> KeptTokens:
    """Return what is kept of n samples' rows.

    `drawn` [n, most] was drawn at each position and `drafted` [n, most] fed to the next one; `counts` [n] rows are a
    sample's own, and at the first `known` [n] of them stands a token that it has already.
    """
    ahead = np.arange(drawn.shape[1])
    forced = ahead < known[:, None]
    alike = (forced | (drawn == drafted)) & (ahead < counts[:, None] - 1)
    kept = 1 + np.cumprod(alike, axis=1).sum(axis=1)
    return KeptTokens(kept, np.maximum(kept - 1 - known, 0))


def cut_at_ends(
    verdict: KeptTokens, ends: npt.NDArray[np.bool_], known: Slots
) -> tuple[KeptTokens, npt.NDArray[np.bool_]]:
    """Return the verdict up to the first new token that `ends` [n, most] a response, and which samples [n] end."""
    ahead = np.arange(ends.shape[1])
    ends = np.logical_and(ends, (ahead >= known[:, None]) & (ahead < verdict.kept[:, None]))
    ended: npt.NDArray[np.bool_] = np.any(ends, axis=1)
    kept = np.where(ended, ends.argmax(axis=1) + 1, verdict.kept)
    return KeptTokens(kept, np.minimum(verdict.accepted, np.maximum(kept - known, 0))), ended
