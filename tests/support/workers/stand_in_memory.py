"""Memory of a missing device, for code that moves data between it and the host."""

import torch
from tests.support.workers.delayed_copies import DelayedCopies

from rlhf_workers.devices.copy_stream import CopyStream


class StandInMemory:
    """A device whose memory is the host's, counted."""

    def __init__(self) -> None:
        self.stream = DelayedCopies()
        self.taken: list[int] = []
        self.on_device_bytes = 0
        self.fails_at = -1

    def host(self, size: int) -> torch.Tensor:
        self.taken.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise torch.cuda.OutOfMemoryError("full")
        self.on_device_bytes += like.nbytes
        return torch.full_like(like, 7)

    def copies(self) -> CopyStream:
        return self.stream

    def free(self) -> int:
        return 0
