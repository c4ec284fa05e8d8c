"""Moves samples of the torch engine with their caches, out and in.

Rule: a copy has the bits of the cache, for all layers and positions. An arriving sample takes a reserved slot and never
displaces another. Must never change a sample that it copies.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rlhf_common.samples import FinishReason, SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineError, EngineLimits
from rlhf_workers.generation.kv_staging import KvStaging
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.kv_cache import PromptCache
from rlhf_workers.models.kv_slices import KvShape, KvSlice

FORMAT = "all layers, all positions, [heads, tokens, size], 1"
"""Format name; changed when the meaning of the transferred data changes."""


class TorchKvMoves:
    """Implements `KvMoves`."""

    def __init__(
        self,
        forward: CausalForward,
        limits: EngineLimits,
        state: Callable[[], EngineState],
        check: Callable[[SampleRequest], None],
        complete_reason: Callable[[SampleRequest], FinishReason],
        *,
        deterministic: bool,
        staging: KvStaging | None = None,
    ) -> None:
        """`state` returns the engine's current state; `check` and `complete_reason` are its rules for a request."""
        self.shapes: tuple[KvShape, ...] = forward.kv_shapes
        self.layout = _fingerprint(forward, self.shapes, limits, deterministic)
        self._limits = limits
        self._staging = staging or KvStaging(forward.device)
        self._state = state
        self._check = check
        self._complete_reason = complete_reason

    @property
    def bytes_per_token(self) -> int:
        """See KvMoves."""
        return sum(shape.bytes for shape in self.shapes)

    def cached(self, key: SampleKey) -> int | None:
        """See KvMoves."""
        state = self._state()
        slot = state.slot(key)
        if slot is not None:
            return int(state.table.position[slot])
        return 0 if key in state.waiting or any(request.key == key for request in state.queue) else None

    def carried(self, key: SampleKey) -> SampleRequest:
        """See KvMoves."""
        state = self._state()
        slot = state.slot(key)
        if slot is None:
            return next(request for request in (*state.waiting.values(), *state.queue) if request.key == key)
        request, response = state.table.requests[slot], state.table.response(slot)
        assert request is not None
        return replace(
            request,
            tokens=response.tokens,
            log_probabilities=response.log_probabilities,
            versions=response.versions,
        )

    def export(self, key: SampleKey, start: int, stop: int) -> KvSlice:
        """See KvMoves."""
        state = self._state()
        slot = state.slot(key)
        assert slot is not None
        pool, row = state.pools.row(slot)
        parts = [part[row, :, start:stop] for layer in sorted(pool.storage) for part in pool.storage[layer]]
        return self._staging.out(parts, start, stop)

    def pause(self, key: SampleKey, paused: bool) -> None:
        """See KvMoves."""
        state = self._state()
        slot = state.slot(key)
        if slot is not None:
            state.table.paused[slot] = paused
        elif not paused and key in state.waiting:
            state.queue.appendleft(state.waiting.pop(key))
        elif paused:
            state.waiting |= {request.key: request for request in state.queue if request.key == key}
            state.queue = deque(request for request in state.queue if request.key != key)

    def reserve(self) -> bool:
        """See KvMoves."""
        state = self._state()
        if len(state.in_flight) + state.reserved >= self._limits.max_batch_size:
            return False
        state.reserved += 1
        return True

    def release(self) -> None:
        """See KvMoves."""
        state = self._state()
        state.reserved = max(state.reserved - 1, 0)

    @torch.inference_mode()
    def admit(self, request: SampleRequest, cache: KvSlice | None) -> None:
        """See KvMoves."""
        self.release()
        state = self._state()
        self._check(request)
        name = f"sample {request.key.sample} of iteration {request.key.iteration}"
        if request.key in state.in_flight:
            raise EngineError("DuplicateSample", f"{name} is already in this engine")
        if self._complete_reason(request):
            raise EngineError("KvInconsistent", f"{name} is complete; it needs no worker any more")
        if cache is None or not cache.stop:
            state.queue.append(request)
            state.in_flight.add(request.key)
            return
        first, last = len(request.prompt) - 1, len(request.prompt) + len(request.tokens) - 1
        if cache.start or not max(first, 1) <= cache.stop <= last or not cache.fits(self.shapes):
            problem = f"{name}: a cache of positions {cache.start} to {cache.stop}, needs 0 to {first} .. {last}"
            raise EngineError("KvInconsistent", f"{problem}, {len(self.shapes)} layers of the model's shapes")
        prompts = PromptCache()
        for layer, (keys, values) in enumerate(self._staging.into_device(cache)):
            prompts.states[layer] = keys[None], values[None]
        state.place(request, cache.stop, prompts)
        state.in_flight.add(request.key)


def _fingerprint(forward: CausalForward, shapes: Sequence[KvShape], limits: EngineLimits, deterministic: bool) -> str:
    """Return a short hash of facts that must be equal, with bit-relevant settings in deterministic mode."""
    config = forward.model.config.get_text_config()
    facts = {
        "format": FORMAT,
        "model": config.model_type,
        "vocabulary": forward.vocabulary,
        "shapes": [[shape.heads, shape.key_size, shape.value_size, str(shape.dtype)] for shape in shapes],
        "attention": [forward.kinds, forward.window],
        "longest": [limits.max_prompt_tokens, limits.max_response_tokens],
        "deterministic": deterministic,
    }
    if deterministic:
        cpu = torch.backends.cpu.get_cpu_capability() if forward.device.type == "cpu" else ""
        facts["bits"] = [forward.device.type, torch.get_num_threads(), cpu, torch.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
