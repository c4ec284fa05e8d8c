"""How far each sample of a step may be drafted for, by what the step and the caches have room for.

Rule: a draft takes what nobody else needs: tokens of a step that no sample decodes or prefills, and blocks of caches
that are free. So no sample is left out of a step, or pushed out of the caches, for a draft. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DecodingSample(NamedTuple):
    """A sample of which the next step decodes one token at least."""

    name: str
    tokens: int
    """Prompt and response; all but the last of them are in its cache."""
    longest: int
    """Most tokens that are of use to it, 0 or more."""


def draft_budget(
    samples: Sequence[DecodingSample], step_tokens: int, free_blocks: int, block_tokens: int
) -> dict[str, int]:
    """Return for each sample how many drafted tokens may be verified, 0 or more.

    `step_tokens` are those that a step may run beside what it runs anyway, `free_blocks` those of the caches, of
    `block_tokens` positions each, before the step gives any to the samples.
    """
    free = free_blocks - sum((sample.tokens - 1) % block_tokens == 0 for sample in samples)
    room: dict[str, int] = {}
    left = max(0, step_tokens)
    for number, sample in enumerate(samples):
        longest = max(0, min(sample.longest, left // (len(samples) - number)))
        within = -sample.tokens % block_tokens
        """Positions left in the block that the next token goes to."""
        if longest > within:
            more = min(-(-(longest - within) // block_tokens), max(0, free))
            longest = min(longest, within + more * block_tokens)
            free -= more
        room[sample.name] = longest
        left -= longest
    return room


def padded_widths(widest: int, captured: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return int64 [widest + 1]: rows of a pass over 0, 1, 2 ... rows, which is filled up to the next captured size."""
    rows = np.arange(widest + 1, dtype=np.int64)
    if not captured:
        return rows
    sizes = np.array(sorted(captured), np.int64)
    place = np.searchsorted(sizes, rows)
    return np.where((place < len(sizes)) & (rows > 0), sizes[place.clip(max=len(sizes) - 1)], rows)
