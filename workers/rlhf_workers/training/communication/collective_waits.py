"""Text about the current wait of this process for other ranks of its training group, for heartbeats."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LONGEST: Final = 200
"""Maximum characters of the text."""
_present = ""


@contextmanager
def told_to_wait_for(description: str) -> Iterator[None]:
    """Report this wait while the context is open, such as `a transfer of rank 1`."""
    global _present
    before, _present = _present, description
    try:
        yield
    finally:
        _present = before


def present_wait() -> str:
    """Return the current wait of the process, at most LONGEST characters; empty: none."""
    present = _present
    return present if len(present) <= LONGEST else f"{present[: LONGEST - 3]}..."
