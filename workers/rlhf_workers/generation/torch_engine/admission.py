"""Admits samples from the queue: prefills their prefixes, and gives each a slot and a cache row.

Rule: samples of a batch with equal prefixes share a prefill. In deterministic mode response tokens are not prefilled,
and prompts share a pass only if that was proven exact. Must never take a reserved slot.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rlhf_common.samples import SampleRequest
from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.generation.engine import EngineLimits, Prefill, StepReport
from rlhf_workers.generation.torch_engine.buckets import padded
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.tiles import Tiles

PREFILL_TOKENS: Final = 4096
"""Maximum padded tokens of a batch; a longer sample is a batch of its own. A step begins no batch after as many."""

ADMIT_SHARE: Final = 8
"""Inverse share of slots that must be free before a crowded engine admits."""


class Admission:
    """The prefills of one engine."""

    def __init__(self, forward: CausalForward, tiles: Tiles | None, limits: EngineLimits) -> None:
        """`tiles` are those of a deterministic engine, else None."""
        self._forward = forward
        self._tiles = tiles
        self._most = limits.max_batch_size

    def admit(self, state: EngineState, report: StepReport) -> None:
        """Admit queued samples while slots and this step's prefill tokens last.

        Does nothing until an eighth of the slots (or as many as are queued) is free.
        """
        if state.free < min(len(state.queue), -(-self._most // ADMIT_SHARE)):
            return
        share = PREFILL_TOKENS
        while state.queue and state.free > 0 and share > 0:
            if self._has_cached_turn(state, state.queue[0]):
                self._go_on(state, report)
                continue
            batch: list[SampleRequest] = []
            length = 0
            while state.queue and len(batch) < state.free and not self._has_cached_turn(state, state.queue[0]):
                longest = max(length, padded(len(self._prefix(state.queue[0]))))
                if batch and (longest * (len(batch) + 1) > PREFILL_TOKENS or (self._tiles and longest != length)):
                    break
                batch.append(state.queue.popleft())
                length = longest
            share -= length * len(batch)
            try:
                self._place(state, batch, length)
            except Exception:
                admitted = {request.key for request in state.table.requests if request is not None}
                state.queue.extendleft(request for request in reversed(batch) if request.key not in admitted)
                raise
            tokens = sum(len(self._prefix(request)) for request in batch)
            resumed = self._tiles is None and all(len(request.tokens) for request in batch)
            report.prefills.append(Prefill(len(batch), tokens, resumed))
            report.prefilled += tokens

    def _has_cached_turn(self, state: EngineState, request: SampleRequest) -> bool:
        return state.turn_cache is not None and state.turn_cache.fits(request)

    def _go_on(self, state: EngineState, report: StepReport) -> None:
        """Place the first sample of the queue with its cached turn; if that fails it is prefilled next time."""
        assert state.turn_cache is not None
        request = state.queue[0]
        cached = state.turn_cache.take(request.key)
        state.place(request, cached.position, cached.states)
        state.queue.popleft()
        report.reused += cached.position

    def _prefix(self, request: SampleRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the tokens to prefill."""
        if self._tiles is None and len(request.tokens):
            return np.concatenate([request.prompt, request.tokens[:-1]])
        return request.prompt[:-1]

    def _place(self, state: EngineState, batch: Sequence[SampleRequest], length: int) -> None:
        """Prefill the distinct prefixes of `batch`, padded to `length`, and give every sample a slot and a row."""
        prefixes = [self._prefix(request) for request in batch]
        distinct = {prefix.tobytes(): prefix for prefix in prefixes}
        rows = {content: row for row, content in enumerate(distinct)}
        ids = np.zeros((len(distinct), length), np.int64)
        for row, prefix in enumerate(distinct.values()):
            ids[row, : len(prefix)] = prefix
        sources = np.array([rows[prefix.tobytes()] for prefix in prefixes])
        first = 0
        while first < len(ids):
            count = len(ids) - first
            if self._tiles is not None and length:
                count = self._tiles.prompts(count, length)
            prompts = (
                self._forward.prefill(to_device(ids[first : first + count], self._forward.device)) if length else None
            )
            members = np.flatnonzero((sources >= first) & (sources < first + count))
            slots = np.array([state.table.add(batch[int(member)], len(prefixes[member])) for member in members])
            state.pools.place(slots, state.table.position[slots], prompts, sources[members] - first)
            first += count
