"""Host-side record of the samples an engine decodes: one slot a sample, everything a step reads or writes as arrays.

Rule: a slot keeps its number from admission to finish; a decode step touches the table by whole arrays, never sample by
sample. Arrays start short and double, so memory follows the longest sample, not the limit. A sample's sequence is its
prompt, its response, and behind them the tokens that were drafted for it, which are nobody's until `advance` says so.
Must never hold a response token without its log-probability and weight version.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf_common.samples import FinishReason, ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.sampling import WORDS_PER_BLOCK, marked, uniforms

FIRST_COLUMNS: Final = 64
"""Response tokens a slot can hold at first."""
UNIFORM_BLOCK: Final = 64
"""Uniforms drawn at a time for a sample, from a multiple of the generator's block on: more than a pass draws of one."""
NO_BLOCK: Final = -UNIFORM_BLOCK
"""Where no uniform is at hand."""

Slots = npt.NDArray[np.int64]


class ResponseTable:
    """Up to `slots` samples."""

    def __init__(self, slots: int) -> None:
        self.requests: list[SampleRequest | None] = [None] * slots
        self.prompt_length = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        """[slots] response tokens known."""
        self.limit = np.zeros(slots, np.int64)
        """[slots] response tokens at most."""
        self.known = np.zeros(slots, np.int64)
        """[slots] response tokens that the sample came with."""
        self.position = np.zeros(slots, np.int64)
        """[slots] place in the sequence (prompt, then response) of the token fed next."""
        self.paused = np.zeros(slots, bool)
        """[slots] stays where it is while others are decoded on."""
        self.changes = 0
        """Times that a sample came or went."""
        self._taken = np.zeros(slots, bool)
        self._followed = np.zeros(slots, np.int64)
        self._sent = np.zeros(slots, np.int64)
        self._sequence = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._log_probabilities = np.zeros((slots, FIRST_COLUMNS), np.float32)
        self._versions = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._uniforms = np.zeros((slots, UNIFORM_BLOCK), np.float64)
        self._block = np.full(slots, NO_BLOCK, np.int64)
        """[slots] response position of the first uniform that is at hand."""
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    def add(self, request: SampleRequest, position: int) -> int:
        """Takes a sample whose sequence is in the KV cache up to `position` (exclusive); returns its slot."""
        slot = self._free.pop()
        known, prompt = len(request.tokens), len(request.prompt)
        self._widen(known)
        self._lengthen(prompt + known)
        self.requests[slot] = request
        self._taken[slot] = True
        self.prompt_length[slot] = prompt
        self.length[slot] = self.known[slot] = known
        self.limit[slot] = request.max_response_tokens
        self.position[slot] = position
        self._sequence[slot, :prompt] = request.prompt
        self._sequence[slot, prompt : prompt + known] = request.tokens
        self._log_probabilities[slot, :known] = request.log_probabilities
        if known:
            runs = request.versions
            self._versions[slot, :known] = np.repeat([run.version for run in runs], [run.tokens for run in runs])
        self._sent[slot] = self._followed[slot] = known
        self.changes += 1
        self.paused[slot] = False
        self._block[slot] = NO_BLOCK
        return slot

    def remove(self, slot: int) -> None:
        """Frees a slot."""
        self.requests[slot] = None
        self._taken[slot] = False
        self.changes += 1
        self._free.append(slot)

    def fed(self, slots: Slots, ahead: Slots | int = 0) -> npt.NDArray[np.int32]:
        """Return the tokens int32 [n] that stand `ahead` places behind the one that each of `slots` is fed next."""
        tokens: npt.NDArray[np.int32] = self._sequence[slots, self.position[slots] + ahead]
        return tokens

    def draft(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Puts drafted tokens behind a sample's sequence, until it is moved on."""
        end = int(self.prompt_length[slot] + self.length[slot])
        self._lengthen(end + len(tokens))
        self._sequence[slot, end : end + len(tokens)] = tokens

    def uniform(self, slots: Slots, ahead: Slots | int = 0) -> npt.NDArray[np.float64]:
        """Return uniforms float64 [n] of the response position that each of `slots` decides next, or of one `ahead`.

        All that are asked for of one slot at once lie within a block.
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
        """Moves every slot on by one position with what was sampled there; returns [n]: False where a token that was
        known before stands there instead."""
        index = self.position[slots] + 1 - self.prompt_length[slots]
        fresh = index >= self.length[slots]
        self._record(slots[fresh], index[fresh], tokens[fresh], log_probabilities[fresh], version)
        self.length[slots[fresh]] = index[fresh] + 1
        self.position[slots] += 1
        return fresh

    def advance_by(
        self,
        slots: Slots,
        kept: Slots,
        tokens: npt.NDArray[np.int64],
        log_probabilities: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """Moves every slot on by `kept` [n] positions with what was sampled there, [n, most]; tokens that were known
        before stay what they are."""
        first = self.position[slots] + 1 - self.prompt_length[slots]
        ahead = np.arange(tokens.shape[1])
        fresh = (ahead < kept[:, None]) & (first[:, None] + ahead >= self.length[slots, None])
        row, column = np.nonzero(fresh)
        self._record(slots[row], first[row] + column, tokens[row, column], log_probabilities[row, column], version)
        self.length[slots] = np.maximum(self.length[slots], first + kept)
        self.position[slots] += kept

    def known_ahead(self, slots: Slots) -> Slots:
        """Return how many tokens [n] that are known already each of `slots` comes to before it draws its next one."""
        return self.length[slots] + self.prompt_length[slots] - self.position[slots] - 1

    def occupied(self) -> Slots:
        """Return the slots that have a sample, [n]."""
        return np.flatnonzero(self._taken)

    def key(self, slot: int) -> SampleKey:
        """Return the sample of a slot that has one."""
        request = self.requests[slot]
        assert request is not None
        return request.key

    def shorten(self, slot: int, length: int) -> None:
        """Takes back the tokens of a response behind `length`: it ends there."""
        self.length[slot] = length

    def keys(self, slots: Slots) -> list[SampleKey]:
        """Return the samples of these slots."""
        return [request.key for slot in slots if (request := self.requests[slot]) is not None]

    def tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the response tokens known, int32 [n]."""
        first = self.prompt_length[slot]
        return self._sequence[slot, first : first + self.length[slot]]

    def sequence(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the prompt and the response tokens known, int32 [n]."""
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
        """Return the response tokens, int32 [n], that were drawn since the last time this was asked, copied."""
        tokens = self.tokens(slot)[self._followed[slot] :].copy()
        self._followed[slot] = self.length[slot]
        return tokens

    def unsent(self) -> list[ResponsePart]:
        """Responses with tokens no earlier call returned, from the first of those on."""
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
        """Writes new tokens [n] at response positions `index` [n]."""
        if not len(slots):
            return
        self._widen(int(index.max()) + 1)
        place = self.prompt_length[slots] + index
        self._lengthen(int(place.max()) + 1)
        self._sequence[slots, place] = tokens
        self._log_probabilities[slots, index] = log_probabilities
        self._versions[slots, index] = version

    def _widen(self, columns: int) -> None:
        """Makes room for `columns` response tokens."""
        have = self._versions.shape[1]
        if columns > have:
            more = ((0, 0), (0, max(have, columns - have)))
            self._log_probabilities = np.pad(self._log_probabilities, more)
            self._versions = np.pad(self._versions, more)

    def _lengthen(self, columns: int) -> None:
        """Makes room for sequences of `columns` tokens."""
        have = self._sequence.shape[1]
        if columns > have:
            self._sequence = np.pad(self._sequence, ((0, 0), (0, max(have, columns - have))))


def version_runs(versions: npt.NDArray[np.int32]) -> tuple[VersionSpan, ...]:
    """Runs of equal weight versions."""
    if not versions.size:
        return ()
    if versions[0] == versions[-1] and (versions == versions[0]).all():
        return (VersionSpan(int(versions[0]), versions.size),)
    ends = np.append(np.flatnonzero(versions[1:] != versions[:-1]) + 1, versions.size)
    lengths = np.diff(ends, prepend=0)
    return tuple(VersionSpan(int(versions[end - 1]), int(length)) for end, length in zip(ends, lengths, strict=True))
