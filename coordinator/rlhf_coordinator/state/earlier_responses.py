"""Responses of earlier epochs, by the line of their prompt: a sample is drafted by them before it has siblings.

Rule: plain data with a bound that holds at every moment. A prompt's newest responses replace its older ones. A prompt
that is not held yet is taken only while there is room: epochs go over all prompts, so pushing out the prompt that was
seen longest ago would push out the one that comes next. Must never hold a response that was not finished. When the
process dies, what the kept segments of the journal hold is read again; the rest comes with the next epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlhf_coordinator.state.sample import ITEM_BYTES

MAX_TOKENS: Final = 8 << 20
"""Of all prompts together: 32 MiB, little beside what a coordinator holds of an iteration."""
MAX_RESPONSES: Final = 16
"""Of one prompt: a usual prompt group. More say little that is new, and each is sent to every worker of the group."""


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """A finished response of an iteration before."""

    iteration: int
    sample: int
    tokens: bytes
    """int32, little endian; at least one."""

    def __len__(self) -> int:
        return len(self.tokens) // ITEM_BYTES


class EarlierResponses:
    """The store of one job."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._by_line: dict[int, tuple[EarlierResponse, ...]] = {}
        self.tokens = 0
        """Held now."""
        self.refused = 0
        """Tokens that there was no room for."""

    def of(self, line: int) -> tuple[EarlierResponse, ...]:
        """Return what is held of a prompt, newest first."""
        return self._by_line.get(line, ())

    def add(self, line: int, responses: Iterable[EarlierResponse]) -> None:
        """Take in finished responses of one iteration to a prompt."""
        held = self.of(line)
        before = sum(map(len, held))
        room = self._max_tokens - self.tokens + before
        kept: list[EarlierResponse] = []
        for response in (*responses, *held):
            if len(kept) == MAX_RESPONSES:
                break
            if len(response) > room:
                self.refused += len(response)
                continue
            room -= len(response)
            kept.append(response)
        if kept:
            self._by_line[line] = tuple(kept)
        else:
            self._by_line.pop(line, None)
        self.tokens += sum(map(len, kept)) - before
