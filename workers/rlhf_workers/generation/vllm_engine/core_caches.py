"""The keys and values of what an engine core decodes: which positions are there, copies of them, and samples that hold
still.

Rule: asks vLLM's scheduler between two steps, when what it counts as computed is computed. A sample that holds still
keeps its place, its blocks and its tokens: the scheduler passes over a running one as over one whose turn has not come,
and the connector holds back one that waits. Must never take blocks from a sample, or step.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from rlhf_workers.generation.vllm_engine.kv_connector import ArrivedCache, MovedCacheConnector
from rlhf_workers.generation.vllm_engine.kv_executor import ExecutorLayers
from rlhf_workers.models.kv_slices import KvSlice

NEVER: Final = sys.maxsize
"""A step that does not come."""

CallAll = Callable[[str, tuple[Any, ...]], list[Any]]
"""Calls a method in every executor process; returns what each says, in the order of ranks."""


class CoreCaches:
    """What a core with a `MovedCacheConnector` holds."""

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
        """Heads of keys of the whole model."""
        return int(self._config.model_config.get_total_num_kv_heads())

    @property
    def refusal(self) -> str:
        """Why samples of this model cannot move with their caches; empty: they can."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
            return f"its caches are {' and '.join(kinds)} in {len(groups)} groups, not whole sequences in one"
        if self._config.parallel_config.pipeline_parallel_size > 1:
            return "its layers are spread over a pipeline"
        return ""

    def describe(self) -> list[ExecutorLayers]:
        """Return the caches of each executor process, in the order of ranks."""
        return self._call_all("rlhf_describe_kv", (self.kv_heads,))

    def positions(self, name: str) -> int | None:
        """Return how many positions of a sample are in blocks, or wait for them; None: it is not here."""
        request = self._scheduler.requests.get(name)
        if request is None:
            return None
        arrived = self._connector.arrived(name)
        if arrived is not None:
            return arrived.stop
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        return max(0, min(int(computed), int(request.num_tokens) - 1))

    def export(self, name: str, start: int, stop: int) -> list[KvSlice]:
        """Return copies of these positions of each executor process's heads, in the order of ranks."""
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
        """Take the whole cache of a sample that was added and has not been taken up."""
        self._connector.keep(name, ArrivedCache(cache, tuple(layers)))

    def hold_still(self, name: str, still: bool) -> None:
        """Let a sample that is here not be decoded, or let it go on."""
        request = self._scheduler.requests.get(name)
        if request is None:
            return
        request.next_decode_eligible_step = NEVER if still else 0
        (self._connector.held_back.add if still else self._connector.held_back.discard)(name)

    def moving(self) -> bool:
        """Return whether a sample is here that does not hold still: else a step has nothing to do."""
        return any(name not in self._connector.held_back for name in self._scheduler.requests)

    def room_for(self, samples: int) -> bool:
        """Return whether so many samples of the longest length find blocks besides those that wait for theirs."""
        needed = [int(self._config.model_config.max_model_len)] * samples + list(self._connector.waiting_tokens)
        blocks = sum(-(-(tokens + 1) // self._block_tokens) for tokens in needed)
        return blocks <= int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
