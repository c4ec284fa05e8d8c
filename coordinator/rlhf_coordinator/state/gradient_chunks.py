"""Chunks of a batch: the prompts whose gradients are added in one piece, in a journaled order (`spec.training.stream`).

Every chunk has the same number of prompts, so the order of the prompts determines the chunks. Prompts without a
journaled place follow in the order of their numbers, so the order of a whole batch is known once it is complete.
Rule: pure.
"""

import math
from collections.abc import Sequence

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.job import RLHFJobSpec


def groups_per_chunk(spec: RLHFJobSpec) -> int:
    """Return the prompts per chunk: the fewest that fill micro-batches on every data parallel rank. 0 in a job that
    does not stream."""
    if spec.training.stream == "Disabled":
        return 0
    per_prompt = samples_per_prompt(spec)
    return math.lcm(per_prompt, spec.training.micro_batch_size * spec.training.parallelism.data) // per_prompt


def chunk_numbers(streamed: Sequence[int], groups: int, per_chunk: int) -> list[int]:
    """Return the number of each prompt's chunk, from 1, by prompt; empty without chunks.

    `streamed`: prompts with a journaled place, in that order. `groups`: number of prompts of the batch.
    """
    if not per_chunk:
        return []
    first = set(streamed)
    order = [*streamed, *(group for group in range(groups) if group not in first)]
    numbers = [0] * groups
    for place, group in enumerate(order):
        numbers[group] = place // per_chunk + 1
    return numbers
