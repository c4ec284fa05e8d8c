"""Which points are measured to know what decoding and prefilling cost an engine: batches, contexts and prompts.

Rule: pure functions of an engine's limits; points come in the order in which they are worth a measurement, for time may
end before they do. The first ones say how a cost grows: the corners of the grid.
"""

from collections.abc import Callable
from typing import Final

from rlhf_workers.generation.engine import EngineLimits

CORNERS: Final = 4
"""Points of decoding that are seen whatever they take: two batches at two contexts."""
PREFILL_CORNERS: Final = 2
"""Likewise of prefill: two lengths. By one alone a pass would be all tokens and no setup."""
PREFILL_PROMPTS: Final = (1, 4)
MANY_PROMPTS: Final = 16


def decode_points(
    limits: EngineLimits,
    steps: int,
    *,
    whole: Callable[[int], bool] = lambda batch: True,
    placed: Callable[[int], int] = lambda context: context,
) -> list[tuple[int, int]]:
    """(batch, context): batch 1 and the largest at half the longest sequence and at a sixteenth, for large batches are
    short ones; every power of two between them there; then all of them at full length and a quarter.

    A point takes `steps` steps. Of batches between the ends only those that are `whole` count, and a context is where
    `placed` puts it.
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
    """(prompts, tokens) that an engine would prefill: prompts alone where it `replays` known tokens, else whole
    samples; as many prompts at once as an iteration begins with, about; whole ones of the greatest length last."""
    longest = limits.max_prompt_tokens - 1
    if not replays:
        longest += limits.max_response_tokens - 1
    prompts = [count for count in PREFILL_PROMPTS if count <= limits.max_batch_size]
    grid = [(count, max(longest * part // 16, 1)) for part, count in [(4, 1), (1, 1)]]
    grid.append((min(MANY_PROMPTS, limits.max_batch_size), max(limits.max_prompt_tokens - 1, 1)))
    grid += [(count, max(longest * part // 16, 1)) for part in (4, 16) for count in prompts]
    return list(dict.fromkeys(grid)) if longest else []
