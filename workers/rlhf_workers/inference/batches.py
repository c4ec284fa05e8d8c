"""Which waiting samples share a forward pass.

Rule: pure. The oldest waiting sample is always in the batch, so none starves; the rest are nearest to it in length,
so that little is padding.
"""

from collections import deque

from rlhf_workers.inference.model_scorer import PAD
from rlhf_workers.inference.samples import Sample


def next_batch(waiting: deque[Sample], batch_tokens: int) -> list[Sample]:
    """Takes the next batch out of `waiting`: at most `batch_tokens` tokens with padding, and one sample at least.

    `batch_tokens` 0 takes the oldest alone.
    """
    oldest = waiting.popleft()
    batch, longest = [oldest], oldest.length
    for sample in sorted(waiting, key=lambda sample: abs(sample.length - oldest.length)):
        longest = max(longest, sample.length)
        if (len(batch) + 1) * -(-longest // PAD) * PAD > batch_tokens:
            break
        batch.append(sample)
    taken = {id(sample) for sample in batch}
    remaining = [sample for sample in waiting if id(sample) not in taken]
    waiting.clear()
    waiting.extend(remaining)
    return batch
