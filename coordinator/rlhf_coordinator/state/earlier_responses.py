"""Responses of earlier iterations, by the line of their prompt: draft hints for new samples of it.

Rule: plain data with fixed limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlhf_coordinator.state.sample import ITEM_BYTES

MAX_TOKENS: Final = 8 << 20
"""Most tokens of all prompts: 32 MiB."""
MAX_RESPONSES: Final = 16
"""Most responses of one prompt."""


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """A response of an earlier iteration, whole or as far as it was decoded."""

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
        """Number of stored tokens."""
        self.refused = 0
        """Number of tokens of responses for which `max_tokens` had no room, summed over all additions."""

    def for_line(self, line: int) -> tuple[EarlierResponse, ...]:
        """Return the stored responses to a prompt, those of the last addition first."""
        return self._by_line.get(line, ())

    def add(self, line: int, responses: Iterable[EarlierResponse]) -> None:
        """Add responses of one iteration to a prompt, as far as they fit.

        Older responses to the prompt that no longer fit are dropped.
        """
        earlier = self.for_line(line)
        before = sum(map(len, earlier))
        room = self._max_tokens - self.tokens + before
        retained: list[EarlierResponse] = []
        for response in (*responses, *earlier):
            if len(retained) == MAX_RESPONSES:
                break
            if len(response) > room:
                self.refused += len(response)
                continue
            room -= len(response)
            retained.append(response)
        if retained:
            self._by_line[line] = tuple(retained)
        else:
            self._by_line.pop(line, None)
        self.tokens += sum(map(len, retained)) - before

    def remove(self, line: int) -> None:
        """Remove the responses to a prompt that does not come again."""
        self.tokens -= sum(map(len, self._by_line.pop(line, ())))
