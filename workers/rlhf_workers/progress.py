"""What a worker does in a command that takes minutes: loading weights, compiling, making room for caches; in words.

Whoever does such work says so by `stage`, and how far it is by `WorkStage.reached`; heartbeats tell it, and the job's
status shows it behind what the job waits for.
Rule: words for people, never read by a decision; bounded, and written by any thread, read by another. An inner stage
hides the outer one while it lasts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_CHARACTERS: Final = 160
"""Of what is said: a status has room for a sentence."""


class WorkStage:
    """One stretch of work."""

    def __init__(self, what: str) -> None:
        self._what, self._reached = what, ""

    def reached(self, done: float, whole: float) -> None:
        """Say how far it is, as a share of the whole."""
        self._reached = f" {100 * min(1.0, done / whole):.0f}%" if whole > 0 else ""

    def says(self, what: str) -> None:
        """Say what it does now."""
        self._what, self._reached = what, ""

    @property
    def text(self) -> str:
        """What is said of it."""
        return f"{' '.join(self._what.split())}{self._reached}"[:MAX_CHARACTERS]


_stages: list[WorkStage] = []
"""Outermost first. Work of commands has one thread."""


@contextmanager
def stage(what: str) -> Iterator[WorkStage]:
    """Inside, the worker says that it does this: `loading the weights of the policy`."""
    begun = WorkStage(what)
    _stages.append(begun)
    try:
        yield begun
    finally:
        _stages.remove(begun)


def present_stage() -> str:
    """Return what the worker does now; empty while nobody says anything."""
    stages = list(_stages)
    return stages[-1].text if stages else ""
