"""Copies slices of KV caches between a device and host memory, beside decoding.

Out: the slice is gathered into one block of device memory, which goes to pinned memory in one copy; its reader waits.
In: a cache in one block is uploaded in one copy.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from rlhf_workers.devices.copy_stream import CopyStream, copies_of
from rlhf_workers.models.kv_slices import KvSlice

ALIGNMENT: Final = 256
"""Alignment of parts in a block, in bytes."""
HOST: Final = torch.device("cpu")

Layers = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def pinned_bytes(size: int) -> torch.Tensor:
    """Return uint8 [size] of pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class KvStaging:
    """Copies for one device's compute thread."""

    def __init__(
        self,
        device: torch.device,
        copies: CopyStream | None = None,
        host_bytes: Callable[[int], torch.Tensor] = pinned_bytes,
    ) -> None:
        """`copies` None: create a copy stream at the first use, unless the device is a CPU."""
        self._device = device
        self._copies = copies
        self._host_bytes = host_bytes

    def out(self, parts: Sequence[torch.Tensor], start: int, stop: int) -> KvSlice:
        """Copy keys and values [heads, stop - start, size], a pair per layer, to host memory; valid once `ready`."""
        copies = self._stream()
        if copies is None:
            return KvSlice(start, stop, _pairs([part.to(HOST, copy=True).contiguous() for part in parts]))
        ends = _ends(parts)
        gathered = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        for place, part in zip(_places(gathered, ends, parts), parts, strict=True):
            place.copy_(part)
        host = self._host_bytes(ends[-1])
        copies.follow_compute()
        copies.copy(host, gathered)
        mark = copies.mark()
        return KvSlice(start, stop, _pairs(_places(host, ends, parts)), mark.wait)

    def into_device(self, cache: KvSlice) -> Layers:
        """Return the same keys and values on the device, for work queued from now on."""
        copies = self._stream()
        if copies is None or cache.memory is None:
            return tuple((keys.to(self._device), values.to(self._device)) for keys, values in cache.layers)
        there = torch.empty(cache.memory.shape, dtype=torch.uint8, device=self._device)
        copies.follow_compute()
        copies.copy(there, cache.memory)
        copies.mark().hold_compute()
        return tuple((_same_place(keys, there), _same_place(values, there)) for keys, values in cache.layers)

    def _stream(self) -> CopyStream | None:
        if self._copies is None and self._device.type != "cpu":
            self._copies = copies_of(self._device)
        return self._copies


def _ends(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the start of each part, and then the bytes of all parts; both are aligned."""
    ends = [0]
    for part in parts:
        ends.append(-(-(ends[-1] + part.numel() * part.element_size()) // ALIGNMENT) * ALIGNMENT)
    return ends


def _places(memory: torch.Tensor, ends: Sequence[int], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        memory[first : first + part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        for first, part in zip(ends, parts, strict=False)
    ]


def _same_place(part: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of `memory` that corresponds to `part`, which is a view of memory from its start."""
    return memory.view(part.dtype).as_strided(part.shape, part.stride(), part.storage_offset())


def _pairs(parts: Sequence[torch.Tensor]) -> Layers:
    return tuple(zip(parts[::2], parts[1::2], strict=True))
