"""Methods of vLLM's executor processes for moving samples: describe the layers, and copy slices.

Rule: a process handles its own heads. A model with a cache whose layout cannot be learned is refused with the reason.
Must never wait for another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_workers.generation.kv_staging import KvStaging
from rlhf_workers.generation.vllm_engine.kv_blocks import (
    BlockPlaces,
    PagedLayer,
    UnknownLayoutError,
    learn_places,
    read_slice,
)
from rlhf_workers.models.kv_slices import KvShape, KvSlice


@dataclass(frozen=True)
class ExecutorLayers:
    """KV caches of one executor process."""

    names: tuple[str, ...]
    """vLLM's layer names, in order."""
    shapes: tuple[KvShape, ...]
    """Shape of each layer, with this process's heads."""
    first_head: int
    refusal: str = ""
    """Reason why its caches cannot move; empty if they can."""


@dataclass(frozen=True)
class _Learned:
    layers: tuple[PagedLayer, ...]
    places: tuple[BlockPlaces, ...]
    staging: KvStaging
    described: ExecutorLayers


class KvExecutor:
    """Part of the worker extension; `collective_rpc` calls its methods in every executor process."""

    model_runner: Any
    vllm_config: Any
    _rlhf_kv: _Learned | None = None

    def rlhf_describe_kv(self, kv_heads: int) -> ExecutorLayers:
        """Return this process's layers of a model with `kv_heads` key heads, and learn how their blocks are packed."""
        try:
            self._rlhf_kv = _learn(self.vllm_config.compilation_config.static_forward_context, kv_heads)
        except UnknownLayoutError as error:
            return ExecutorLayers((), (), 0, str(error))
        return self._rlhf_kv.described

    def rlhf_export_kv(self, blocks: Sequence[int], block_tokens: int, start: int, stop: int, wait: bool) -> KvSlice:
        """Return a copy of these positions of a sample with these blocks; `wait`: for use by another process."""
        learned = self._rlhf_kv
        assert learned is not None, "rlhf_describe_kv comes first"
        parts: list[torch.Tensor] = []
        for layer, places in zip(learned.layers, learned.places, strict=True):
            parts += read_slice(layer, places, blocks, block_tokens, start, stop)
        piece = learned.staging.out(parts, start, stop)
        if not wait:
            return piece
        piece.ready()
        return KvSlice(start, stop, piece.layers)


def _learn(context: Mapping[str, Any], kv_heads: int) -> _Learned:
    layers = paged_layers(context)
    if not layers:
        raise UnknownLayoutError("no layer keeps keys and values")
    places = tuple(learn_places(layer) for layer in layers)
    shapes = tuple(KvShape(layer.heads, layer.key_size, layer.value_size, layer.cache.dtype) for layer in layers)
    first = own_heads(shapes[0].heads, kv_heads).start
    described = ExecutorLayers(tuple(layer.name for layer in layers), shapes, first)
    return _Learned(layers, places, KvStaging(layers[0].cache.device), described)


def paged_layers(context: Mapping[str, Any]) -> tuple[PagedLayer, ...]:
    """Return the layers with their own caches, in the model's order; `context` is vLLM's static forward context."""
    own = [
        (name, layer)
        for name, layer in context.items()
        if getattr(layer, "kv_cache", None) is not None and getattr(layer, "kv_sharing_target_layer_name", None) is None
    ]
    return tuple(paged_layer(name, layer) for name, layer in own)


def paged_layer(name: str, layer: Any) -> PagedLayer:
    """Return one of vLLM's attention layers with its cache and writer; UnknownLayoutError if it has no writer."""
    impl, cache = layer.impl, layer.kv_cache
    if not isinstance(cache, torch.Tensor) or not hasattr(impl, "do_kv_cache_update"):
        raise UnknownLayoutError(f"{name}: {type(impl).__name__} has no writer of keys and values")

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        impl.do_kv_cache_update(layer, keys, values, cache, slots)

    value_size = getattr(layer, "head_size_v", None) or layer.head_size
    return PagedLayer(name, cache, layer.head_size, value_size, write)


def own_heads(own: int, all_heads: int) -> slice:
    """Return which of all heads this process has, by its rank in the tensor parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())
    return heads_of(rank, ranks, own, all_heads)


def heads_of(rank: int, ranks: int, own: int, all_heads: int) -> slice:
    """Return the heads of a rank that has `own` of all heads; with few heads several ranks have the same ones."""
    copies = max(1, ranks * own // all_heads)
    first = rank // copies * own
    return slice(first, first + own)
