"""Moves a model's weights between host memory and its device.

A frozen model is copied to host memory once, and later only dropped from the device. Onloaded tensors have new
addresses, so captured graphs must be dropped before. On a CPU nothing moves.
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
"""Alignment of tensors in host memory, in bytes."""


class OffloadMemory(Protocol):
    """Host and device memory between which weights move."""

    def host(self, size: int) -> torch.Tensor:
        """Return uint8 [size] of host memory, pinned where possible."""

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialized device memory with the shape and type of `like`."""

    def copies(self) -> CopyStream:
        """Return the stream for the copies."""

    def free(self) -> int:
        """Return unused memory to the device; return the free bytes of the device."""


class DeviceOffload:
    """Implements `OffloadMemory` for a GPU."""

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
    """Unpin memory that is no longer used; views of it stay valid."""
    for memory in taken:
        memory.close()


class MoveTotals:
    """Bytes copied between host and device and the seconds that took, by direction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, float]] = {}

    def add(self, move: str, size: int, seconds: float) -> None:
        """Add one move."""
        with self._lock:
            before, since = self._totals.get(move, (0, 0.0))
            self._totals[move] = before + size, since + seconds

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return (bytes, seconds) by direction."""
        with self._lock:
            return dict(self._totals)


MOVES: Final = MoveTotals()
"""Totals of this process, for its metrics."""


class OffloadableWeights:
    """Weights and buffers of one model that can be offloaded."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        frozen: bool,
        memory: OffloadMemory | None = None,
        apart: Collection[int] = (),
    ) -> None:
        """`model` may be on `device` (onloaded) or on the CPU (offloaded).

        `apart`: ids of its tensors that another model moves, before this one does.
        """
        self._model = model
        self._moves = memory is not None or device.type != "cpu"
        self._frozen, self._apart = frozen, frozenset(apart)
        self._memory: OffloadMemory = memory or DeviceOffload(device)
        self._host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.offloaded = any(tensor.device.type != device.type for tensor in self._tensors())

    def offload(self) -> None:
        """Move the tensors that are not apart to host memory, and free their device memory."""
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
        """Move these tensors back to the device; return when the copies are complete."""
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
        """Return whether a tensor may have changed on the device since it was copied."""
        return not self._frozen

    def _place(self, tensors: list[torch.Tensor], *, filled: bool = False) -> None:
        """Assign tensors a place in host memory; `filled`: copy their current CPU content there."""
        ends = [0]
        for tensor in tensors:
            ends.append(-(-(ends[-1] + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
        if not tensors:
            return
        memory = self._memory.host(ends[-1])
        for tensor, first in zip(tensors, ends, strict=False):
            place = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._host[id(tensor)] = tensor, place  # keeps the tensor alive, so that no other gets its id
            if filled:
                place.copy_(tensor.data)
                tensor.data = place

    def _say(self, move: str, size: int, started: float, more: str) -> None:
        seconds = time.monotonic() - started
        MOVES.add(move, size, seconds)
        log.info("%s: %d bytes in %.3f s (%.1f GB/s) %s", move, size, seconds, size / 1e9 / max(seconds, 1e-9), more)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that move, without those that are apart."""
        yield from (part for part in self._model.parameters() if id(part) not in self._apart)
        yield from (part for part in self._model.buffers() if id(part) not in self._apart)
