"""Reads the KV caches of an engine core: cached positions, copies of slices, and paused samples.

Rule: it is used between two steps. Must never take blocks from a sample, or run a step.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from rlhf_workers.generation.vllm_engine.kv_connector import ArrivedCache, MovedCacheConnector
from rlhf_workers.generation.vllm_engine.kv_executor import ExecutorLayers
from rlhf_workers.models.kv_slices import KvSlice

NEVER: Final = sys.maxsize
"""Number of a step that never comes."""

CallAll = Callable[[str, tuple[Any, ...]], list[Any]]
"""Calls a method in every executor process and returns the results in order of ranks."""


class CoreCaches:
    """KV caches of a core with a `MovedCacheConnector`."""

    def __init__(self, core: Any, call_all: CallAll) -> None:
        """`core` is vLLM's EngineCore."""
        self._scheduler = core.scheduler
        self._config = core.vllm_config
        self._call_all = call_all
        self._block_tokens = int(self._config.cache_config.block_size)
        connector = core.scheduler.connector
        assert isinstance(connector, MovedCacheConnector)
        self._connector = connector

    @property
    def kv_heads(self) -> int:
        """Return the number of key heads of the whole model."""
        return int(self._config.model_config.get_total_num_kv_heads())

    @property
    def refusal(self) -> str:
        """Return why samples of this model cannot move with their caches; empty if they can."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
            return f"its caches are {' and '.join(kinds)} in {len(groups)} groups, not whole sequences in one"
        if self._config.parallel_config.pipeline_parallel_size > 1:
            return "its layers are spread over a pipeline"
        return ""

    def describe(self) -> list[ExecutorLayers]:
        """Return the caches of each executor process, in order of ranks."""
        return self._call_all("rlhf_describe_kv", (self.kv_heads,))

    def positions(self, name: str) -> int | None:
        """Return the positions of a sample that are in blocks or wait for them; None if it is not here."""
        request = self._scheduler.requests.get(name)
        if request is None:
            return None
        arrived = self._connector.arrived(name)
        if arrived is not None:
            return arrived.stop
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return max(0, min(int(computed), int(request.num_tokens) - 1))

    def export(self, name: str, start: int, stop: int) -> list[KvSlice]:
        """Return copies of these positions for each executor process's heads, in order of ranks.

        A cache that still waits for blocks is one copy with all heads.
        """
        arrived = self._connector.arrived(name)
        if arrived is not None:
            layers = tuple(
                (keys[:, start:stop].clone(), values[:, start:stop].clone()) for keys, values in arrived.layers
            )
            return [KvSlice(start, stop, layers)]
        blocks = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
        apart = self._config.parallel_config.world_size > 1
        return self._call_all("rlhf_export_kv", (blocks, self._block_tokens, start, stop, apart))

    def keep(self, name: str, cache: KvSlice, layers: Sequence[str]) -> None:
        """Store the whole cache of a sample that was added and is not scheduled yet."""
        self._connector.keep(name, ArrivedCache(cache, tuple(layers)))

    def hold_still(self, name: str, still: bool) -> None:
        """Pause or resume a sample."""
        request = self._scheduler.requests.get(name)
        if request is None:
            return
        request.next_decode_eligible_step = NEVER if still else 0
        (self._connector.held_back.add if still else self._connector.held_back.discard)(name)

    def moving(self) -> bool:
        """Return whether a sample is here that is not paused; otherwise a step has nothing to do."""
        return any(name not in self._connector.held_back for name in self._scheduler.requests)

    def room_for(self, samples: int) -> bool:
        """Return whether so many samples of the longest length fit, beside those that wait for blocks."""
        needed = [int(self._config.model_config.max_model_len)] * samples + list(self._connector.waiting_tokens)
        blocks = sum(-(-(tokens + 1) // self._block_tokens) for tokens in needed)
        return blocks <= int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
