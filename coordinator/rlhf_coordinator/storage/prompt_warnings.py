"""Warnings about probable mistakes in the prompt files, with the place and the remedy."""

from dataclasses import dataclass

from rlhf_coordinator.storage.prompt_places import Place


@dataclass
class _Kind:
    first: Place
    last: Place
    further: int = 0


class PromptWarnings:
    """Warnings about prompt files, collected by kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def add(self, place: Place, problem: str, remedy: str) -> None:
        """Warn about a line. `problem` continues the sentence after its place; equal warnings are one kind."""
        kind = self._kinds.setdefault((problem, remedy), _Kind(place, place))
        if kind.last != place:
            kind.last, kind.further = place, kind.further + 1

    def messages(self) -> tuple[str, ...]:
        """Return one sentence per kind, in the order in which the kinds were found."""
        return tuple(
            f"{kind.first} {problem}{_and_further(kind)}: {remedy}" for (problem, remedy), kind in self._kinds.items()
        )


def _and_further(kind: _Kind) -> str:
    return f" (and {kind.further} more {kind.first.unit}s)" if kind.further else ""
