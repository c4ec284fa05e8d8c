"""A model's weights between host memory and the device that computes with them.

Rule: offloaded means that no weight is on the device, onloaded that all of them are. A frozen model is copied to host
memory once and from then on only dropped from the device; one whose weights are replaced is copied back. Host memory
is pinned, taken once and kept: as many bytes as the tensors have, in one piece for all that came together. Copies are
queued one behind the other and waited for once, and a tensor changes sides only when all are there, so a lack of memory
leaves everything where it was. Onloaded tensors have new addresses: who knows the old ones (captured graphs) must
forget them before. On a CPU nothing ever moves. Must never leave a model half on each side.
"""

import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from typing import Final, Protocol

import torch
from torch import nn

from rlhf_workers.devices.copy_stream import CopyStream, copies_of
from rlhf_workers.shared_memory.choice import private_memory
from rlhf_workers.shared_memory.host_regions import MappedMemory

log = logging.getLogger(__name__)

ALIGNMENT: Final = 256
"""Bytes between which tensors begin in host memory."""


class OffloadMemory(Protocol):
    """The memory on both sides of a device that weights leave and come back to."""

    def host(self, size: int) -> torch.Tensor:
        """Return uint8 [size] of host memory, pinned where that is possible, as long as this object is there."""

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """Return device memory of the shape and type of `like`, its content undefined."""

    def copies(self) -> CopyStream:
        """Return what copies between them."""

    def free(self) -> int:
        """Gives memory that nothing holds back to the device; returns the bytes that the device has free now."""


class DeviceOffload:
    """Implements `OffloadMemory` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: CopyStream | None = None
        self._taken: list[MappedMemory] = []
        weakref.finalize(self, _unpin, self._taken).atexit = False  # the driver may be gone by then

    def host(self, size: int) -> torch.Tensor:
        """See OffloadMemory."""
        self._taken.append(private_memory(size, self._device))
        return self._taken[-1].memory

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """See OffloadMemory."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def copies(self) -> CopyStream:
        """See OffloadMemory."""
        if self._copies is None:
            self._copies = copies_of(self._device)
        return self._copies

    def free(self) -> int:
        """See OffloadMemory."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


def _unpin(taken: list[MappedMemory]) -> None:
    """Memory is not pinned for nobody; what still looks at it keeps it."""
    for memory in taken:
        memory.close()


class MoveTotals:
    """Bytes that this process copied between host and device, and the time that took, by direction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, float]] = {}

    def add(self, move: str, size: int, seconds: float) -> None:
        """Adds one move."""
        with self._lock:
            before, since = self._totals.get(move, (0, 0.0))
            self._totals[move] = before + size, since + seconds

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return (bytes, seconds) by direction."""
        with self._lock:
            return dict(self._totals)


MOVES: Final = MoveTotals()
"""Of this process, for its metrics."""


class OffloadableWeights:
    """Weights and buffers of one model."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        frozen: bool,
        memory: OffloadMemory | None = None,
        apart: Collection[int] = (),
    ) -> None:
        """`model` may be loaded on `device` (onloaded) or on the CPU (offloaded). `apart`: ids of its tensors that
        another model's moves bring along, before this one's."""
        self._model = model
        self._moves = memory is not None or device.type != "cpu"
        self._frozen, self._apart = frozen, frozenset(apart)
        self._memory: OffloadMemory = memory or DeviceOffload(device)
        self._host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.offloaded = any(tensor.device.type != device.type for tensor in self._tensors())

    def offload(self) -> None:
        """Moves everything to host memory and frees the device."""
        if self.offloaded or not self._moves:
            return
        tensors = list(self._tensors())
        started, before = time.monotonic(), self._memory.free()
        new = [tensor for tensor in tensors if id(tensor) not in self._host]
        self._place(new)
        first = {id(tensor) for tensor in new}
        copied = [tensor for tensor in tensors if id(tensor) in first or self._changes(tensor)]
        copies = self._memory.copies()
        copies.follow_compute()
        for tensor in copied:
            copies.copy(self._host[id(tensor)][1], tensor.data)
        copies.mark().wait()
        for tensor in tensors:
            tensor.data = self._host[id(tensor)][1]
        self.offloaded = True
        freed = self._memory.free() - before
        self._say(
            "offload", sum(tensor.nbytes for tensor in copied), started, f"{freed:,} bytes of the device are free again"
        )

    def onload(self) -> None:
        """Brings everything to the device; returns when it is there."""
        if not self.offloaded:
            return
        tensors = list(self._tensors())
        started = time.monotonic()
        self._place([tensor for tensor in tensors if id(tensor) not in self._host], filled=True)
        arrived = [self._memory.on_device(tensor.data) for tensor in tensors]
        copies = self._memory.copies()
        copies.follow_compute()
        for tensor, target in zip(tensors, arrived, strict=True):
            copies.copy(target, tensor.data)
        copies.mark().wait()
        for tensor, target in zip(tensors, arrived, strict=True):
            tensor.data = target
        self.offloaded = False
        self._say("onload", sum(tensor.nbytes for tensor in tensors), started, "")

    def _changes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have changed on the device since it was copied."""
        return not self._frozen

    def _place(self, tensors: list[torch.Tensor], *, filled: bool = False) -> None:
        """Gives tensors their place in host memory; `filled`: what is on the CPU now goes there."""
        ends = [0]
        for tensor in tensors:
            ends.append(-(-(ends[-1] + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
        if not tensors:
            return
        memory = self._memory.host(ends[-1])
        for tensor, first in zip(tensors, ends, strict=False):
            place = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._host[id(tensor)] = tensor, place  # the tensor too, or another could get its id
            if filled:
                place.copy_(tensor.data)
                tensor.data = place

    def _say(self, move: str, size: int, started: float, more: str) -> None:
        seconds = time.monotonic() - started
        MOVES.add(move, size, seconds)
        log.info("%s: %d bytes in %.3f s (%.1f GB/s) %s", move, size, seconds, size / 1e9 / max(seconds, 1e-9), more)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that move; those that are apart do not."""
        yield from (part for part in self._model.parameters() if id(part) not in self._apart)
        yield from (part for part in self._model.buffers() if id(part) not in self._apart)
