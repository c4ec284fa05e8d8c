"""What a torch engine holds of its samples: from the queue through slots and rows to responses not yet reported.

Rule: one object, so that all of it can be put aside at once. Every sample of `held` is in exactly one of queue,
waiting, table and complete. Must never be shared between engines.
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
    held: set[SampleKey] = field(default_factory=set)
    complete: list[ResponsePart] = field(default_factory=list)
    waiting: dict[SampleKey, SampleRequest] = field(default_factory=dict)
    """Samples of the queue that are paused."""
    turn_cache: TurnCache | None = None
    """Of samples that were reported as finished, by which they go on; None: nothing is kept."""
    reserved: int = 0
    """Slots kept for samples that arrive from other workers."""

    def enqueue(self, request: SampleRequest) -> None:
        """Puts a sample into the queue; one that goes on with what is kept of it comes before those that begin."""
        if self.turn_cache is not None and self.turn_cache.fits(request):
            self.queue.appendleft(request)
        else:
            self.queue.append(request)

    def place(self, request: SampleRequest, position: int, states: PromptCache) -> None:
        """Gives a sample a slot and a row with keys and values `states` of one prompt, up to `position` of its
        sequence; where that fails it has neither."""
        slots = np.array([self.table.add(request, position)])
        try:
            self.pools.place(slots, self.table.position[slots], states, np.zeros(1, np.int64))
        except BaseException:
            self.pools.drop(slots)
            self.table.remove(int(slots[0]))
            raise

    @property
    def free(self) -> int:
        """Slots for samples of the queue."""
        return self.table.free - self.reserved

    def slot(self, key: SampleKey) -> int | None:
        """Where a sample is decoded."""
        for slot, request in enumerate(self.table.requests):
            if request is not None and request.key == key:
                return slot
        return None
