"""A torch engine's samples: in the queue, in slots and rows, and complete but not yet reported.

Rule: between steps, a sample in `in_flight` is in exactly one of queue, waiting, table and complete. Must never be
shared between engines.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.generation.torch_engine.kv_cache import PromptCache
from rlhf_workers.generation.torch_engine.kv_pools import KvPools
from rlhf_workers.generation.torch_engine.response_table import ResponseTable
from rlhf_workers.generation.torch_engine.turn_cache import TurnCache


@dataclass
class EngineState:
    """Samples of one engine."""

    table: ResponseTable
    pools: KvPools
    queue: deque[SampleRequest] = field(default_factory=deque)
    in_flight: set[SampleKey] = field(default_factory=set)
    complete: list[ResponsePart] = field(default_factory=list)
    waiting: dict[SampleKey, SampleRequest] = field(default_factory=dict)
    """Queued samples that are paused."""
    turn_cache: TurnCache | None = None
    """Caches of finished samples that may resume; None if turns are not cached."""
    reserved: int = 0
    """Slots reserved for samples that arrive from other workers."""

    def enqueue(self, request: SampleRequest) -> None:
        """Queue a sample; one with a cached turn goes before new ones. A cached turn that does not fit is dropped."""
        if self.turn_cache is not None and self.turn_cache.fits(request):
            self.queue.appendleft(request)
            return
        if self.turn_cache is not None:
            self.turn_cache.drop(request.key)
        self.queue.append(request)

    def place(self, request: SampleRequest, position: int, states: PromptCache) -> None:
        """Give a sample a slot and a row with `states` of one prompt, up to `position` of its sequence.

        If that fails, the sample has neither.
        """
        slots = np.array([self.table.add(request, position)])
        try:
            self.pools.place(slots, self.table.position[slots], states, np.zeros(1, np.int64))
        except BaseException:
            self.pools.drop(slots)
            self.table.remove(int(slots[0]))
            raise

    @property
    def free(self) -> int:
        """Return the number of free slots that are not reserved."""
        return self.table.free - self.reserved

    def slot(self, key: SampleKey) -> int | None:
        """Return the slot of a sample, or None."""
        for slot, request in enumerate(self.table.requests):
            if request is not None and request.key == key:
                return slot
        return None
