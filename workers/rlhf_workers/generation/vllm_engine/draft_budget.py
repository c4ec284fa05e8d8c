"""Limits the draft of each sample by the free capacity of the step and the caches. Pure.

Rule: a draft uses spare capacity: tokens that a step has left after decoding and prefilling, and free cache blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DecodingSample(NamedTuple):
    """A sample of which the next step decodes at least one token."""

    name: str
    tokens: int
    """Prompt and response tokens; all but the last are in its cache."""
    longest: int
    """Maximum useful drafted tokens, 0 or more."""


def draft_budget(
    samples: Sequence[DecodingSample], step_tokens: int, free_blocks: int, block_tokens: int
) -> dict[str, int]:
    """Return the maximum drafted tokens for each sample, 0 or more.

    `step_tokens`: tokens that a step may run beside one of each sample. `free_blocks`: free cache blocks of
    `block_tokens` positions.
    """
    free = free_blocks - sum((sample.tokens - 1) % block_tokens == 0 for sample in samples)
    room: dict[str, int] = {}
    left = max(0, step_tokens)
    for number, sample in enumerate(samples):
        longest = max(0, min(sample.longest, left // (len(samples) - number)))
        within = -sample.tokens % block_tokens
        """Positions left in the block of the next token."""
        if longest > within:
            more = min(-(-(longest - within) // block_tokens), max(0, free))
            longest = min(longest, within + more * block_tokens)
            free -= more
        room[sample.name] = longest
        left -= longest
    return room


def padded_widths(widest: int, captured: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return int64 [widest + 1]: rows of a pass over 0, 1, 2 ... rows, padded to the next captured size if there is
    one."""
    rows = np.arange(widest + 1, dtype=np.int64)
    if not captured:
        return rows
    sizes = np.array(sorted(captured), np.int64)
    place = np.searchsorted(sizes, rows)
    return np.where((place < len(sizes)) & (rows > 0), sizes[place.clip(max=len(sizes) - 1)], rows)
