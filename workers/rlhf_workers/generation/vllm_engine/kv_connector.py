"""vLLM's connector for samples that arrive with caches: reports computed tokens, and writes their bytes into blocks.

The scheduler's connector stores an arrived cache in host memory until the sample gets blocks. Must never store a cache
whose sample is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from rlhf_workers.generation.vllm_engine.kv_blocks import slots_of, write_slice
from rlhf_workers.generation.vllm_engine.kv_executor import own_heads, paged_layer
from rlhf_workers.models.kv_slices import KvSlice

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

CONNECTOR: Final = "MovedCacheConnector"
"""Name of the class below, for KVTransferConfig."""


@dataclass(frozen=True)
class ArrivedCache:
    """A cache that waits for blocks."""

    cache: KvSlice
    layers: tuple[str, ...]
    """vLLM's names of the layers in `cache.layers`."""


@dataclass(frozen=True)
class CacheLoad:
    """Positions start .. stop-1 of an arrived cache to load into blocks."""

    arrived: ArrivedCache
    start: int
    slots: "torch.Tensor"
    """Target slots, int64 [stop - start]."""


@dataclass
class CacheLoads(KVConnectorMetadata):  # type: ignore[misc]  # untyped base
    """Loads of one step."""

    loads: list[CacheLoad] = field(default_factory=list)


class MovedCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped bases
    """Loads arrived caches; `keep` gives them to the scheduler's connector."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig | None" = None
    ) -> None:
        """Take vLLM's arguments."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._arrived: dict[str, ArrivedCache] = {}
        self._loads: list[CacheLoad] = []
        self.held_back: set[str] = set()
        """Requests of paused samples; a waiting one is not scheduled."""

    # ------------------------------------------------------------ for kv_moves

    def keep(self, request: str, arrived: ArrivedCache) -> None:
        """Store the cache of a request that was added since the last step."""
        self._arrived[request] = arrived

    def arrived(self, request: str) -> KvSlice | None:
        """Return the cache of a request that waits for blocks; None if none waits."""
        arrival = self._arrived.get(request)
        return None if arrival is None else arrival.cache

    @property
    def waiting_tokens(self) -> Sequence[int]:
        """Return the number of positions of each cache that waits for blocks."""
        return [arrival.cache.stop for arrival in self._arrived.values()]

    # ------------------------------------------------------------ beside the scheduler

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM; return the tokens beyond those in the local prefix cache, or None to wait."""
        if request.request_id in self.held_back:
            return None, False
        arrival = self._arrived.get(request.request_id)
        return (0 if arrival is None else max(arrival.cache.stop - num_computed_tokens, 0)), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See vLLM; the request has blocks and is part of this step."""
        arrival = self._arrived.pop(request.request_id, None)
        if arrival is not None and num_external_tokens:
            start, stop = arrival.cache.stop - num_external_tokens, arrival.cache.stop
            slots = slots_of(blocks.get_block_ids()[0], self._block_tokens, start, stop)
            self._loads.append(CacheLoad(arrival, start, slots))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See vLLM; return the loads of this step."""
        loads, self._loads = self._loads, []
        return CacheLoads(loads)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM; drop the state of an ended request, whose blocks are free."""
        self._arrived.pop(request.request_id, None)
        self.held_back.discard(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.request_finished(request, [])

    # ------------------------------------------------------------ in every executor process

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """See vLLM; called before the pass that reads the loaded caches."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CacheLoads)
        for load in metadata.loads:
            start, stop = load.start, load.arrived.cache.stop
            for name, (keys, values) in zip(load.arrived.layers, load.arrived.cache.layers, strict=True):
                layer = paged_layer(name, forward_context.no_compile_layers[name])
                heads = own_heads(layer.heads, keys.shape[0])
                write_slice(layer, keys[heads, start:stop], values[heads, start:stop], load.slots)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM; everything is loaded by then."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM; nothing to do, as exports are read between two steps (`kv_executor`)."""

    def wait_for_save(self) -> None:
        """See vLLM; nothing is saved."""
