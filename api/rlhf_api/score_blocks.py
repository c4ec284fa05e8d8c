"""Incremental scoring, as both sides see it: blocks of positions, and the tasks that can start before a sample ends.

Such a task gives one number per token, which depends only on the tokens before it, so whole blocks of an unfinished
response can be scored while it is decoded. A reward depends on the whole text and is not among them.
"""

from collections.abc import Iterable
from typing import Final

from rlhf_api.algorithms import Task

BLOCK: Final = 64
"""Tokens per block, prompt included. Deterministic scoring computes whole blocks of positions, 0..63, 64..127, ...,
each with all keys up to its end. Smaller blocks cost more passes; larger ones leave a longer rest when a sample is
finished."""


def incremental_tasks(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return the names of the tasks whose scores can be computed block by block."""
    return tuple(task.name for task in tasks if task.incremental)


def whole_blocks(tokens: int) -> int:
    """Return the number of whole blocks that can be scored when `tokens` tokens of a sample are known.

    A token is scored by the state before it, so the last block also needs the token that follows it.
    """
    return max(0, tokens - 1) // BLOCK
