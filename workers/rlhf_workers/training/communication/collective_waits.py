"""What this process waits for of the other ranks of its training group now, in words.

Heartbeats tell it. Ranks wait for each other, so when one hangs all of them stand still: the one that waits for nobody
is the one that hangs. Rule: written by the compute thread alone and read by any; no decision of a worker reads it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LONGEST: Final = 200
"""Characters that are told: a reduction names all its ranks, and the coordinator refuses long texts."""
_present = ""


@contextmanager
def told_to_wait_for(what: str) -> Iterator[None]:
    """Inside, the process says that it waits for this: `a transfer of rank 1`."""
    global _present
    before, _present = _present, what
    try:
        yield
    finally:
        _present = before


def present_wait() -> str:
    """Return what the process waits for, at most LONGEST characters; empty: nothing."""
    present = _present
    return present if len(present) <= LONGEST else f"{present[: LONGEST - 3]}..."
