"""Incremental scoring for both sides: blocks of positions, and the tasks that can start before a sample ends.

Such a task produces one number per token that does not depend on later tokens.
"""

from collections.abc import Iterable
from typing import Final

from rlhf_api.algorithms import Task

BLOCK: Final = 64
"""Tokens per block, with the prompt: positions 0..63, 64..127, ..."""


def incremental_tasks(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return the names of the tasks whose scores can be computed block by block."""
    return tuple(task.name for task in tasks if task.incremental)


def whole_blocks(tokens: int) -> int:
    """Return the number of whole blocks that can be scored when `tokens` tokens of a sample are known.

    The state before a token scores it, so the last block also needs the token after it.
    """
    return max(0, tokens - 1) // BLOCK
