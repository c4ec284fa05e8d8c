"""Incremental scoring, as both sides see it: the block of positions, and the tasks that can begin before a sample ends.

A number of these tasks belongs to one token and depends on what stands before it alone, so the blocks of an unfinished
response can be scored while it is decoded. A reward is of the whole text and is not among them.
"""

from collections.abc import Iterable
from typing import Final

from rlhf_api.algorithms import Task

BLOCK: Final = 64
"""Tokens, prompt included. Deterministic scoring computes whole blocks of positions, 0..63, 64..127, ..., each with all
keys up to its end: fewer cost more passes, more leave a longer rest when a sample is finished."""


def incremental_tasks(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Names of the tasks whose scores can be computed block by block."""
    return tuple(task.name for task in tasks if task.incremental)


def whole_blocks(tokens: int) -> int:
    """Blocks of a sample of so many tokens that can be scored when no more is known of it.

    The last token of a block is scored by the state before it, so what a block says of the next token needs that too.
    """
    return max(0, tokens - 1) // BLOCK
