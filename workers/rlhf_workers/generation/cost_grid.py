"""Chooses the points at which the cost of decoding and prefilling is measured: batches, contexts and prompts. Pure.

Rule: the most important points come first.
"""

from collections.abc import Callable
from typing import Final

from rlhf_workers.generation.engine import EngineLimits

CORNERS: Final = 4
"""Number of first decode points measured regardless of time: usually two batches at two contexts."""
PREFILL_CORNERS: Final = 2
"""Number of first prefill points measured regardless of time; usually they have two lengths."""
PREFILL_PROMPTS: Final = (1, 4)
MANY_PROMPTS: Final = 16


def decode_points(
    limits: EngineLimits,
    steps: int,
    *,
    whole: Callable[[int], bool] = lambda batch: True,
    placed: Callable[[int], int] = lambda context: context,
) -> list[tuple[int, int]]:
    """Return (batch, context) points: batch 1 and the largest batch at half the longest sequence and at a sixteenth,
    then powers of two between them, then full and quarter lengths.

    Contexts are shortened by `steps` + 1 tokens. Inner batches must be `whole`; `placed` adjusts a context.
    """
    largest = limits.max_batch_size
    batches = sorted({min(2**power, largest) for power in range(largest.bit_length() + 1)})
    batches = [batch for batch in batches if batch in (1, largest) or whole(batch)]
    ends, inner = list(dict.fromkeys((batches[0], batches[-1]))), batches[-2:0:-1]
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    contexts = [placed(max(longest * part // 16 - steps - 1, 1)) for part in (8, 1, 16, 4)]
    corners = [(batch, context) for context in contexts[:2] for batch in ends]
    inside = [(batch, context) for context in contexts[:2] for batch in inner]
    rest = [(batch, context) for context in contexts[2:] for batch in (*ends, *inner)]
    return list(dict.fromkeys((*corners, *inside, *rest)))


def prefill_points(limits: EngineLimits, *, replays: bool) -> list[tuple[int, int]]:
    """Return (prompts, tokens of each) points of prefills.

    With `replays`, the longest point is a prompt, otherwise a whole sample.
    """
    longest = limits.max_prompt_tokens - 1
    if not replays:
        longest += limits.max_response_tokens - 1
    prompts = [count for count in PREFILL_PROMPTS if count <= limits.max_batch_size]
    grid = [(count, max(longest * part // 16, 1)) for part, count in [(4, 1), (1, 1)]]
    grid.append((min(MANY_PROMPTS, limits.max_batch_size), max(limits.max_prompt_tokens - 1, 1)))
    grid += [(count, max(longest * part // 16, 1)) for part in (4, 16) for count in prompts]
    return list(dict.fromkeys(grid)) if longest else []
