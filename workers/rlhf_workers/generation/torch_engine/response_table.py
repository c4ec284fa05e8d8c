"""Table of the samples that an engine decodes: one slot per sample, with the data of a step as arrays.

Must never store a response token without its log-probability and weight version.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf_common.samples import FinishReason, ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.sampling import WORDS_PER_BLOCK, marked, uniforms

FIRST_COLUMNS: Final = 64
"""Initial capacity of a slot in tokens."""
UNIFORM_BLOCK: Final = 64
"""Uniforms drawn at once per sample, from a multiple of the generator's block; more than one pass uses."""
NO_BLOCK: Final = -UNIFORM_BLOCK
"""Start of an empty block of uniforms."""

Slots = npt.NDArray[np.int64]


class ResponseTable:
    """Table of up to `slots` samples."""

    def __init__(self, slots: int) -> None:
        self.requests: list[SampleRequest | None] = [None] * slots
        self.prompt_length = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        """Known response tokens, [slots]."""
        self.limit = np.zeros(slots, np.int64)
        """Maximum response tokens, [slots]."""
        self.known = np.zeros(slots, np.int64)
        """Response tokens that the sample arrived with, [slots]."""
        self.position = np.zeros(slots, np.int64)
        """Position in the sequence (prompt, then response) of the next token to feed, [slots]."""
        self.paused = np.zeros(slots, bool)
        """Whether the sample waits while others are decoded, [slots]."""
        self.changes = 0
        """Number of samples added or removed so far."""
        self._taken = np.zeros(slots, bool)
        self._followed = np.zeros(slots, np.int64)
        self._sent = np.zeros(slots, np.int64)
        self._sequence = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._log_probabilities = np.zeros((slots, FIRST_COLUMNS), np.float32)
        self._versions = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._uniforms = np.zeros((slots, UNIFORM_BLOCK), np.float64)
        self._block = np.full(slots, NO_BLOCK, np.int64)
        """Response position of the first available uniform, [slots]."""
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Return the number of slots without a sample."""
        return len(self._free)

    def add(self, request: SampleRequest, position: int) -> int:
        """Add a sample whose sequence is cached up to `position` (exclusive); return its slot."""
        slot = self._free.pop()
        response, prompt = len(request.tokens), len(request.prompt)
        self._widen(response)
        self._lengthen(prompt + response)
        self.requests[slot] = request
        self._taken[slot] = True
        self.prompt_length[slot] = prompt
        self.length[slot] = self.known[slot] = response
        self.limit[slot] = request.max_response_tokens
        self.position[slot] = position
        self._sequence[slot, :prompt] = request.prompt
        self._sequence[slot, prompt : prompt + response] = request.tokens
        self._log_probabilities[slot, :response] = request.log_probabilities
        if response:
            runs = request.versions
            self._versions[slot, :response] = np.repeat([run.version for run in runs], [run.tokens for run in runs])
        self._sent[slot] = self._followed[slot] = response
        self.changes += 1
        self.paused[slot] = False
        self._block[slot] = NO_BLOCK
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot."""
        self.requests[slot] = None
        self._taken[slot] = False
        self.changes += 1
        self._free.append(slot)

    def fed(self, slots: Slots, ahead: Slots | int = 0) -> npt.NDArray[np.int32]:
        """Return the tokens int32 [n] that are `ahead` positions after the next token to feed of each slot."""
        tokens: npt.NDArray[np.int32] = self._sequence[slots, self.position[slots] + ahead]
        return tokens

    def draft(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Store drafted tokens after a sample's sequence, until the sample advances."""
        end = int(self.prompt_length[slot] + self.length[slot])
        self._lengthen(end + len(tokens))
        self._sequence[slot, end : end + len(tokens)] = tokens

    def uniform(self, slots: Slots, ahead: Slots | int = 0) -> npt.NDArray[np.float64]:
        """Return uniforms float64 [n] for the response position that each slot decides next, or the one `ahead`
        positions later. Those requested for one slot at once must lie within a block.
        """
        index = self.position[slots] + 1 - self.prompt_length[slots] + ahead
        outside = (index < self._block[slots]) | (index >= self._block[slots] + UNIFORM_BLOCK)
        for slot in np.unique(slots[outside]):
            self._refill(int(slot), int(index[slots == slot].min()))
        drawn: npt.NDArray[np.float64] = self._uniforms[slots, index - self._block[slots]]
        return drawn

    def advance(
        self, slots: Slots, tokens: npt.NDArray[np.int64], log_probabilities: npt.NDArray[np.float32], version: int
    ) -> npt.NDArray[np.bool_]:
        """Advance every slot by one position with its sampled token; known tokens take precedence.

        Return [n]: False if a known token is at the position.
        """
        index = self.position[slots] + 1 - self.prompt_length[slots]
        fresh = index >= self.length[slots]
        self._record(slots[fresh], index[fresh], tokens[fresh], log_probabilities[fresh], version)
        self.length[slots[fresh]] = index[fresh] + 1
        self.position[slots] += 1
        return fresh

    def advance_by(
        self,
        slots: Slots,
        positions: Slots,
        tokens: npt.NDArray[np.int64],
        log_probabilities: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """Advance every slot by `positions` [n] with its sampled tokens, [n, most]; known tokens stay."""
        first = self.position[slots] + 1 - self.prompt_length[slots]
        ahead = np.arange(tokens.shape[1])
        fresh = (ahead < positions[:, None]) & (first[:, None] + ahead >= self.length[slots, None])
        row, column = np.nonzero(fresh)
        self._record(slots[row], first[row] + column, tokens[row, column], log_probabilities[row, column], version)
        self.length[slots] = np.maximum(self.length[slots], first + positions)
        self.position[slots] += positions

    def known_ahead(self, slots: Slots) -> Slots:
        """Return the number of known tokens [n] that each slot replays before it draws."""
        return self.length[slots] + self.prompt_length[slots] - self.position[slots] - 1

    def occupied(self) -> Slots:
        """Return the slots with a sample, [n]."""
        return np.flatnonzero(self._taken)

    def key(self, slot: int) -> SampleKey:
        """Return the key of the sample in an occupied slot."""
        request = self.requests[slot]
        assert request is not None
        return request.key

    def shorten(self, slot: int, length: int) -> None:
        """Cut a response after `length` tokens."""
        self.length[slot] = length

    def keys(self, slots: Slots) -> list[SampleKey]:
        """Return the keys of the samples in these slots, without empty slots."""
        return [request.key for slot in slots if (request := self.requests[slot]) is not None]

    def tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the known response tokens, int32 [n]."""
        first = self.prompt_length[slot]
        return self._sequence[slot, first : first + self.length[slot]]

    def sequence(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the prompt and the known response tokens, int32 [n]."""
        return self._sequence[slot, : self.prompt_length[slot] + self.length[slot]]

    def response(self, slot: int, offset: int = 0, finish_reason: FinishReason = "") -> ResponsePart:
        """Return the response tokens from `offset` on, copied."""
        request = self.requests[slot]
        assert request is not None
        part = slice(offset, int(self.length[slot]))
        return ResponsePart(
            request.key,
            offset,
            self.tokens(slot)[offset:].copy(),
            self._log_probabilities[slot, part].copy(),
            version_runs(self._versions[slot, part]),
            finish_reason,
        )

    def untold(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the response tokens, int32 [n], drawn since the last call or the admission, copied."""
        tokens = self.tokens(slot)[self._followed[slot] :].copy()
        self._followed[slot] = self.length[slot]
        return tokens

    def unsent(self) -> list[ResponsePart]:
        """Return the responses with new tokens since the last call or the admission, from the first new token on."""
        parts = []
        for slot in np.flatnonzero(self.length > self._sent):
            if self.requests[slot] is not None:
                parts.append(self.response(int(slot), int(self._sent[slot])))
                self._sent[slot] = self.length[slot]
        return parts

    def _refill(self, slot: int, index: int) -> None:
        request = self.requests[slot]
        assert request is not None
        self._block[slot] = index // WORDS_PER_BLOCK * WORDS_PER_BLOCK
        drawn = uniforms(request.random_key, int(self._block[slot]), UNIFORM_BLOCK)
        self._uniforms[slot] = marked(drawn, request.drawing)

    def _record(
        self,
        slots: Slots,
        index: Slots,
        tokens: npt.NDArray[np.int64],
        log_probabilities: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """Write new tokens [n] at response positions `index` [n]."""
        if not len(slots):
            return
        self._widen(int(index.max()) + 1)
        place = self.prompt_length[slots] + index
        self._lengthen(int(place.max()) + 1)
        self._sequence[slots, place] = tokens
        self._log_probabilities[slots, index] = log_probabilities
        self._versions[slots, index] = version

    def _widen(self, columns: int) -> None:
        """Grow to at least `columns` response tokens."""
        have = self._versions.shape[1]
        if columns > have:
            more = ((0, 0), (0, max(have, columns - have)))
            self._log_probabilities = np.pad(self._log_probabilities, more)
            self._versions = np.pad(self._versions, more)

    def _lengthen(self, columns: int) -> None:
        """Grow to sequences of at least `columns` tokens."""
        have = self._sequence.shape[1]
        if columns > have:
            self._sequence = np.pad(self._sequence, ((0, 0), (0, max(have, columns - have))))


def version_runs(versions: npt.NDArray[np.int32]) -> tuple[VersionSpan, ...]:
    """Return the runs of equal weight versions."""
    if not versions.size:
        return ()
    if versions[0] == versions[-1] and (versions == versions[0]).all():
        return (VersionSpan(int(versions[0]), versions.size),)
    ends = np.append(np.flatnonzero(versions[1:] != versions[:-1]) + 1, versions.size)
    lengths = np.diff(ends, prepend=0)
    return tuple(VersionSpan(int(versions[end - 1]), int(length)) for end, length in zip(ends, lengths, strict=True))
