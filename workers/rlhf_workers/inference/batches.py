"""Which waiting samples share a forward pass.

Rule: pure. The oldest waiting sample is always in the batch, so none starves; the rest are nearest to it in length, for
as long as little is padding: one long response among short ones would make each of them as dear as itself.
"""

from collections import deque
from typing import Final

from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.model_scorer import PAD

PADDING_SHARE: Final = 0.25
"""Of the samples' own tokens: more padding costs more than another pass saves."""
FREE_PADDING: Final = 256
"""Tokens of padding that cost less than another pass, which reads all weights once more."""


def next_batch(waiting: deque[ScoringSample], batch_tokens: int) -> list[ScoringSample]:
    """Takes the next batch out of `waiting`: at most `batch_tokens` tokens with padding, and one sample at least.

    `batch_tokens` 0 takes the oldest alone.
    """
    oldest = waiting.popleft()
    batch, longest, own = [oldest], _padded(oldest), _padded(oldest)
    for sample in sorted(waiting, key=lambda sample: abs(sample.length - oldest.length)):
        longest, own = max(longest, _padded(sample)), own + _padded(sample)
        tokens = (len(batch) + 1) * longest
        if tokens > batch_tokens or tokens - own > max(FREE_PADDING, PADDING_SHARE * own):
            break
        batch.append(sample)
    taken = {id(sample) for sample in batch}
    remaining = [sample for sample in waiting if id(sample) not in taken]
    waiting.clear()
    waiting.extend(remaining)
    return batch


def _padded(sample: ScoringSample) -> int:
    return -(-sample.length // PAD) * PAD
