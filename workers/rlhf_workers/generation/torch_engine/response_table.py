"""Host-side record of the samples an engine decodes: one slot a sample, everything a step reads or writes as arrays.

Rule: a slot keeps its number from admission to finish; a decode step touches the table by whole arrays, never sample by
sample. Response arrays start short and double, so memory follows the longest response, not the limit. Must never hold a
token without its log-probability and weight version.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf_api.samples import FinishReason, ResponsePart, SampleRequest, VersionSpan
from rlhf_workers.generation.sampling import uniforms

FIRST_COLUMNS: Final = 64
"""Response tokens a slot can hold at first."""
UNIFORM_BLOCK: Final = 64
"""Uniforms drawn at a time for a sample; a multiple of the generator's block."""

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
        self.position = np.zeros(slots, np.int64)
        """[slots] place in the sequence (prompt, then response) of the token fed next."""
        self.next_token = np.zeros(slots, np.int64)
        """[slots] that token."""
        self.paused = np.zeros(slots, bool)
        """[slots] stays where it is while others are decoded on."""
        self._sent = np.zeros(slots, np.int64)
        self._tokens = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._log_probabilities = np.zeros((slots, FIRST_COLUMNS), np.float32)
        self._versions = np.zeros((slots, FIRST_COLUMNS), np.int32)
        self._uniforms = np.zeros((slots, UNIFORM_BLOCK), np.float64)
        self._block = np.full(slots, -1, np.int64)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots without a sample."""
        return len(self._free)

    def add(self, request: SampleRequest, position: int) -> int:
        """Takes a sample whose sequence is in the KV cache up to `position` (exclusive); returns its slot."""
        slot = self._free.pop()
        known = len(request.tokens)
        self._widen(known)
        self.requests[slot] = request
        self.prompt_length[slot] = len(request.prompt)
        self.length[slot] = known
        self.limit[slot] = request.max_response_tokens
        self.position[slot] = position
        self._tokens[slot, :known] = request.tokens
        self._log_probabilities[slot, :known] = request.log_probabilities
        if known:
            runs = request.versions
            self._versions[slot, :known] = np.repeat([run.version for run in runs], [run.tokens for run in runs])
        self._sent[slot] = known
        self.paused[slot] = False
        self._block[slot] = -1
        at = position - len(request.prompt)
        self.next_token[slot] = request.tokens[at] if at >= 0 else request.prompt[position]
        return slot

    def remove(self, slot: int) -> None:
        """Frees a slot."""
        self.requests[slot] = None
        self._free.append(slot)

    def uniform(self, slots: Slots) -> npt.NDArray[np.float64]:
        """Return uniforms float64 [n] of the response position each of `slots` decides next."""
        index = self.position[slots] + 1 - self.prompt_length[slots]
        block = index // UNIFORM_BLOCK
        for slot in slots[self._block[slots] != block]:
            self._refill(int(slot))
        drawn: npt.NDArray[np.float64] = self._uniforms[slots, index % UNIFORM_BLOCK]
        return drawn

    def advance(
        self, slots: Slots, tokens: npt.NDArray[np.int64], log_probabilities: npt.NDArray[np.float32], version: int
    ) -> npt.NDArray[np.bool_]:
        """Moves every slot on by one position with what was sampled there; returns [n]: False where a token that was
        known before stands there instead."""
        index = self.position[slots] + 1 - self.prompt_length[slots]
        self._widen(int(index.max()) + 1)
        fresh = index >= self.length[slots]
        new, at = slots[fresh], index[fresh]
        self._tokens[new, at] = tokens[fresh]
        self._log_probabilities[new, at] = log_probabilities[fresh]
        self._versions[new, at] = version
        self.length[new] = at + 1
        self.next_token[slots] = self._tokens[slots, index]
        self.position[slots] += 1
        return fresh

    def tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the response tokens known, int32 [n]."""
        return self._tokens[slot, : self.length[slot]]

    def response(self, slot: int, offset: int = 0, finish_reason: FinishReason = "") -> ResponsePart:
        """Return the response tokens from `offset` on, copied."""
        request = self.requests[slot]
        assert request is not None
        part = slice(offset, int(self.length[slot]))
        return ResponsePart(
            request.key,
            offset,
            self._tokens[slot, part].copy(),
            self._log_probabilities[slot, part].copy(),
            version_runs(self._versions[slot, part]),
            finish_reason,
        )

    def unsent(self) -> list[ResponsePart]:
        """Responses with tokens no earlier call returned, from the first of those on."""
        parts = []
        for slot in np.flatnonzero(self.length > self._sent):
            if self.requests[slot] is not None:
                parts.append(self.response(int(slot), int(self._sent[slot])))
                self._sent[slot] = self.length[slot]
        return parts

    def _refill(self, slot: int) -> None:
        request = self.requests[slot]
        assert request is not None
        block = int(self.position[slot] + 1 - self.prompt_length[slot]) // UNIFORM_BLOCK
        self._uniforms[slot] = uniforms(request.random_key, block * UNIFORM_BLOCK, UNIFORM_BLOCK)
        self._block[slot] = block

    def _widen(self, columns: int) -> None:
        """Makes room for `columns` response tokens."""
        have = self._tokens.shape[1]
        if columns <= have:
            return
        more = ((0, 0), (0, max(have, columns - have)))
        self._tokens = np.pad(self._tokens, more)
        self._log_probabilities = np.pad(self._log_probabilities, more)
        self._versions = np.pad(self._versions, more)


def version_runs(versions: npt.NDArray[np.int32]) -> tuple[VersionSpan, ...]:
    """Runs of equal weight versions."""
    if not versions.size:
        return ()
    if versions[0] == versions[-1] and (versions == versions[0]).all():
        return (VersionSpan(int(versions[0]), versions.size),)
    ends = np.append(np.flatnonzero(versions[1:] != versions[:-1]) + 1, versions.size)
    lengths = np.diff(ends, prepend=0)
    return tuple(VersionSpan(int(versions[end - 1]), int(length)) for end, length in zip(ends, lengths, strict=True))
