"""Chooses the waiting samples that share a forward pass.

Rule: the oldest waiting sample is in the batch, so none starves.
"""

from collections import deque
from typing import Final

from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.model_scorer import PAD

PADDING_SHARE: Final = 0.25
"""Maximum padding as a share of the samples' tokens; each sample counts rounded up to PAD."""
FREE_PADDING: Final = 256
"""Tokens of padding that a batch may have regardless of the share."""


def next_batch(waiting: deque[ScoringSample], batch_tokens: int) -> list[ScoringSample]:
    """Remove the next batch from `waiting` and return it: at most `batch_tokens` tokens with padding, but at least one
    sample.
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
