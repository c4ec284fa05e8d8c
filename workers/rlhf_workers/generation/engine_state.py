"""What a torch engine holds of its samples: from the queue through slots and rows to responses not yet reported.

Rule: one object, so that all of it can be put aside at once. Every sample of `held` is in exactly one of queue,
waiting, table and complete. Must never be shared between engines.
"""

from collections import deque
from dataclasses import dataclass, field

from rlhf_workers.generation.lanes import Lanes
from rlhf_workers.generation.protocol import Request, Response, SampleKey
from rlhf_workers.generation.response_table import ResponseTable


@dataclass(frozen=True)
class EngineLimits:
    """Sizes an engine is built for."""

    max_batch_size: int
    """Samples decoded at once; more wait."""
    max_prompt_tokens: int
    max_response_tokens: int


@dataclass
class EngineState:
    """Samples of one engine."""

    table: ResponseTable
    lanes: Lanes
    queue: deque[Request] = field(default_factory=deque)
    held: set[SampleKey] = field(default_factory=set)
    complete: list[Response] = field(default_factory=list)
    waiting: dict[SampleKey, Request] = field(default_factory=dict)
    """Samples of the queue that are paused."""
    reserved: int = 0
    """Slots kept for samples that arrive from other workers."""

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
