"""Waits for conditions, and checks whether a process still exists."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 30.0


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def process_state(pid: int) -> str:
    """Return the letter for the state of a process, such as T for a stopped one; X for one that is no longer there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return process_state(pid) not in "ZX"
