"""Moves samples of the vLLM engine with their caches, out and in.

Rule: the transferred format is neutral, [heads, tokens, size] per layer, joined over the executor processes. An
arriving sample waits in vLLM's queue with its cache, which is loaded when it gets blocks. Must never change a sample
that it copies.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from rlhf_common.samples import FinishReason, SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineError, EngineLimits
from rlhf_workers.generation.requests import sample_name
from rlhf_workers.generation.vllm_engine.kv_executor import ExecutorLayers
from rlhf_workers.models.kv_slices import KvShape, KvSlice

log = logging.getLogger(__name__)

FORMAT: Final = "vllm, all layers, all positions, [heads, tokens, size], 1"
"""Format name; changed when the meaning of the transferred data changes."""


class Caches(Protocol):
    """`core_caches.CoreCaches`: caches of an engine core, by its sample names."""

    @property
    def refusal(self) -> str: ...
    def describe(self) -> list[ExecutorLayers]: ...
    def positions(self, name: str) -> int | None: ...
    def export(self, name: str, start: int, stop: int) -> list[KvSlice]: ...
    def keep(self, name: str, cache: KvSlice, layers: Sequence[str]) -> None: ...
    def hold_still(self, name: str, still: bool) -> None: ...
    def room_for(self, samples: int) -> bool: ...


class Samples(Protocol):
    """The engine's record of its samples."""

    @property
    def in_flight(self) -> int: ...
    def name_of(self, key: SampleKey) -> str | None:
        """Return the core's name of an unfinished sample; None if it is not here."""

    def carried(self, key: SampleKey) -> SampleRequest:
        """Return the request that continues the sample after its last token."""

    def take(self, request: SampleRequest, *, arrives: bool = False) -> str:
        """Add a checked sample to the core; return its name there.

        `arrives`: it comes with a cache that no other sample reads.
        """


def moves_of(
    caches: Caches | None,
    samples: Samples,
    limits: EngineLimits,
    facts: Mapping[str, Any],
    check: Callable[[SampleRequest], None],
    complete_reason: Callable[[SampleRequest], FinishReason],
) -> "VllmKvMoves | None":
    """Return the mover of an engine's samples; None without `caches` or, with a log line, if they cannot move.

    `facts`: what two engines must share, beside shapes and sizes, for one to read the other's caches. `check` and
    `complete_reason`: the engine's rules for a request.
    """
    if caches is None:
        return None
    executors = [] if caches.refusal else caches.describe()
    refusal = caches.refusal or next((executor.refusal for executor in executors if executor.refusal), "")
    if refusal:
        log.warning("samples of this model move by their tokens alone: %s", refusal)
        return None
    return VllmKvMoves(caches, executors, samples, limits, facts, check, complete_reason)


class VllmKvMoves:
    """Implements `KvMoves`."""

    def __init__(
        self,
        caches: Caches,
        executors: Sequence[ExecutorLayers],
        samples: Samples,
        limits: EngineLimits,
        facts: Mapping[str, Any],
        check: Callable[[SampleRequest], None],
        complete_reason: Callable[[SampleRequest], FinishReason],
    ) -> None:
        """Take arguments as `moves_of`; no executor in `executors` refuses."""
        self._caches = caches
        self._samples = samples
        self._limits = limits
        self._check = check
        self._complete_reason = complete_reason
        self._layers = executors[0].names
        self._distinct = _distinct([executor.first_head for executor in executors])
        self.shapes: tuple[KvShape, ...] = tuple(
            shape._replace(heads=shape.heads * len(self._distinct)) for shape in executors[0].shapes
        )
        self.layout = _fingerprint(self.shapes, limits, facts)
        self._reserved = 0

    @property
    def bytes_per_token(self) -> int:
        """See KvMoves."""
        return sum(shape.bytes for shape in self.shapes)

    def cached(self, key: SampleKey) -> int | None:
        """See KvMoves."""
        name = self._samples.name_of(key)
        return None if name is None else self._caches.positions(name)

    def carried(self, key: SampleKey) -> SampleRequest:
        """See KvMoves."""
        return self._samples.carried(key)

    def export(self, key: SampleKey, start: int, stop: int) -> KvSlice:
        """See KvMoves."""
        name = self._samples.name_of(key)
        assert name is not None
        pieces = self._caches.export(name, start, stop)
        return pieces[0] if len(pieces) == 1 else _joined([pieces[rank] for rank in self._distinct])

    def pause(self, key: SampleKey, paused: bool) -> None:
        """See KvMoves."""
        name = self._samples.name_of(key)
        if name is not None:
            self._caches.hold_still(name, paused)

    def reserve(self) -> bool:
        """See KvMoves."""
        more = self._reserved + 1
        if self._samples.in_flight + more > self._limits.max_batch_size or not self._caches.room_for(more):
            return False
        self._reserved = more
        return True

    def release(self) -> None:
        """See KvMoves."""
        self._reserved = max(self._reserved - 1, 0)

    def admit(self, request: SampleRequest, cache: KvSlice | None) -> None:
        """See KvMoves."""
        self.release()
        self._check(request)
        name = sample_name(request.key)
        if self._samples.name_of(request.key) is not None:
            raise EngineError("DuplicateSample", f"{name} is already in this engine")
        if self._complete_reason(request):
            raise EngineError("KvInconsistent", f"{name} is complete; it needs no worker any more")
        if cache is None or not cache.stop:
            self._samples.take(request)
            return
        last = len(request.prompt) + len(request.tokens) - 1
        if cache.start or cache.stop > last or not cache.fits(self.shapes):
            problem = f"{name}: a cache of positions {cache.start} to {cache.stop}, needs 0 to at most {last}"
            raise EngineError("KvInconsistent", f"{problem}, {len(self.shapes)} layers of the model's shapes")
        self._caches.keep(self._samples.take(request, arrives=True), cache, self._layers)


def _distinct(first_heads: Sequence[int]) -> list[int]:
    """Return the ranks whose heads no earlier rank has, in order of heads."""
    ranks = {first: rank for rank, first in reversed(list(enumerate(first_heads)))}
    return [ranks[first] for first in sorted(ranks)]


def _joined(pieces: Sequence[KvSlice]) -> KvSlice:
    """Join slices of different heads."""
    layers = zip(*(piece.layers for piece in pieces), strict=True)
    together = tuple(
        (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer])) for layer in layers
    )
    return KvSlice(pieces[0].start, pieces[0].stop, together)


def _fingerprint(shapes: Sequence[KvShape], limits: EngineLimits, facts: Mapping[str, Any]) -> str:
    """Return a short hash of everything that must be equal."""
    everything = {
        "format": FORMAT,
        "shapes": [[shape.heads, shape.key_size, shape.value_size, str(shape.dtype)] for shape in shapes],
        "longest": [limits.max_prompt_tokens, limits.max_response_tokens],
        **facts,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
