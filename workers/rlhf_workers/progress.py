"""Describes for people what a worker does during a command that takes minutes, such as loading weights.

The code that does such work enters `stage` and reports its progress with `WorkStage.reached`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_CHARACTERS: Final = 160
"""Maximum length of the text in characters."""


class WorkStage:
    """One stage of long work."""

    def __init__(self, description: str) -> None:
        self._description, self._reached = description, ""

    def reached(self, done: float, whole: float) -> None:
        """Set the progress as a share of the whole; show none if the whole is not above 0."""
        self._reached = f" {100 * min(1.0, done / whole):.0f}%" if whole > 0 else ""

    def says(self, description: str) -> None:
        """Set the description of the current work, and clear its progress."""
        self._description, self._reached = description, ""

    @property
    def text(self) -> str:
        """The description with its progress."""
        return f"{' '.join(self._description.split())}{self._reached}"[:MAX_CHARACTERS]


_stages: list[WorkStage] = []
"""Present stages, outermost first."""


@contextmanager
def stage(description: str) -> Iterator[WorkStage]:
    """Describe the work inside, for example `loading the weights of the policy`."""
    begun = WorkStage(description)
    _stages.append(begun)
    try:
        yield begun
    finally:
        _stages.remove(begun)


def present_stage() -> str:
    """Return the text of the innermost stage; empty if there is none."""
    stages = list(_stages)
    return stages[-1].text if stages else ""
