"""Copies of a training rank's weights in memory that others can map.

Rule: a copy is complete before it is lent, and is not written while it has readers. Host memory without readers is
reused for another version; device memory is freed after its last reader. A copy is never written again if a reader
ended without confirming its read.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.devices.copy_stream import copies_of
from rlhf_workers.failures import WorkError
from rlhf_workers.shared_memory.checksums import checksums
from rlhf_workers.shared_memory.regions import LentRegion, MemorySharing, RegionRefusedError
from rlhf_workers.weights.manifest import ALIGNMENT, places, shaped
from rlhf_workers.weights.tensor_types import NAMES
from rlhf_workers.worker_role import WeightProvider

MOST_COPIES: Final = 6
"""Maximum copies at once, including those with late readers."""


@dataclass
class WeightCopy:
    """One version of one model in one region."""

    provider: WeightProvider
    model: str
    sharing: MemorySharing
    region: LentRegion
    manifest: pb.WeightManifest
    readers: int = 0
    spoiled: bool = False
    """Whether a reader ended without confirming its read, so that it may still read."""

    def message(self) -> pb.WeightLoan:
        """Return the message to a reader."""
        return pb.WeightLoan(manifest=self.manifest, memory=self.region.handle())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter name, tensor) in the provider's order."""
        yield from shaped(self.manifest, places(self.manifest, self.region.memory)).items()

    def is_of(self, provider: WeightProvider, model: str, version: int, sharing: MemorySharing) -> bool:
        """Return whether the copy has this provider, model, version and kind of memory."""
        same = self.provider is provider and self.sharing is sharing and self.model == model
        return same and self.manifest.version == version


@dataclass
class WeightCopies:
    """All copies of a worker. Thread-safe; one copy is written at a time."""

    sharings: Sequence[MemorySharing]
    """Kinds of memory, in order of preference."""
    _copies: list[WeightCopy] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _making: threading.Lock = field(default_factory=threading.Lock)

    def take(self, provider: WeightProvider, request: pb.WeightRequest, reader: pb.MemoryPlace) -> WeightCopy:
        """Return a copy that `reader` can map, until `give_back`.

        Raises RegionRefusedError without such memory, and WorkError from the provider.
        """
        first = next(iter(provider.tensors(request.model, request.version)), None)
        where = first[1].device if first is not None else torch.device("cpu")
        reached = [sharing for sharing in self.sharings if sharing.reaches(reader)]
        usable = [sharing for sharing in reached if not sharing.transient or sharing.device == where]
        if not usable:
            raise RegionRefusedError("the reader maps no memory of this worker")
        refused: list[str] = []
        with self._making:
            for sharing in usable:
                with self._lock:
                    copy = self._find(provider, request, sharing)
                    if copy is not None:
                        copy.readers += 1
                        return copy
                try:
                    return self._make(provider, request, sharing)
                except RegionRefusedError as error:
                    refused.append(str(error))
        raise RegionRefusedError("; ".join(refused))

    def give_back(self, copy: WeightCopy, *, read: bool) -> None:
        """End one reader's loan. `read`: whether it certainly reads no more."""
        with self._lock:
            copy.readers -= 1
            copy.spoiled = copy.spoiled or not read
            superseded = any(
                other is not copy and other.sharing is copy.sharing and other.model == copy.model
                for other in self._copies
            )
            if copy.readers == 0 and (copy.spoiled or superseded or copy.sharing.transient):
                self._drop(copy)

    def close(self) -> None:
        """Drop the copies without readers."""
        with self._lock:
            for copy in [copy for copy in self._copies if not copy.readers]:
                self._drop(copy)

    def _find(self, provider: WeightProvider, request: pb.WeightRequest, sharing: MemorySharing) -> WeightCopy | None:
        matching = (copy for copy in self._copies if copy.is_of(provider, request.model, request.version, sharing))
        return next(matching, None)

    def _drop(self, copy: WeightCopy) -> None:
        self._copies.remove(copy)
        copy.region.close()

    def _make(self, provider: WeightProvider, request: pb.WeightRequest, sharing: MemorySharing) -> WeightCopy:
        """Create a copy with its first reader."""
        manifest, size = _layout(provider, request)
        region = self._idle_region(provider, request.model, sharing, size) or sharing.allocate(size)
        try:
            _fill(provider, request, manifest, region.memory)
        except BaseException:
            region.close()
            raise
        copy = WeightCopy(provider, request.model, sharing, region, manifest, readers=1)
        with self._lock:
            self._copies.append(copy)
        return copy

    def _idle_region(
        self, provider: WeightProvider, model: str, sharing: MemorySharing, size: int
    ) -> LentRegion | None:
        """Return this model's memory of this size that has no readers, or None; free its other idle copies.

        Raises RegionRefusedError if there is none and MOST_COPIES copies remain.
        """
        region: LentRegion | None = None
        with self._lock:
            for old in [copy for copy in self._copies if not copy.readers and copy.sharing is sharing]:
                fits = old.model == model and old.region.memory.shape[0] == max(size, 1)
                if fits and region is None:
                    self._copies.remove(old)  # until it is complete again
                    region = old.region
                elif old.provider is not provider or old.model == model:
                    self._drop(old)
            if region is None and len(self._copies) >= MOST_COPIES:
                read = sum(copy.readers > 0 for copy in self._copies)
                raise RegionRefusedError(f"{read} of {len(self._copies)} copies of weights are still being read")
        return region


def _layout(provider: WeightProvider, request: pb.WeightRequest) -> tuple[pb.WeightManifest, int]:
    """Return the manifest without checksums, and the bytes of the region."""
    manifest = pb.WeightManifest(version=request.version)
    end = 0
    for name, tensor in provider.tensors(request.model, request.version):
        if tensor.dtype not in NAMES:
            raise WorkError("WeightsInvalid", f"{request.model} parameter {name}: {tensor.dtype} does not travel")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        manifest.tensors.add(name=name, dtype=NAMES[tensor.dtype], shape=tensor.shape, offset=offset)
        end = offset + tensor.numel() * tensor.element_size()
    return manifest, end


def _fill(
    provider: WeightProvider, request: pb.WeightRequest, manifest: pb.WeightManifest, memory: torch.Tensor
) -> None:
    """Copy every tensor to its place and compute the checksums of the copies."""
    parts = places(manifest, memory)
    copies = None
    for part, (_, tensor) in zip(parts, provider.tensors(request.model, request.version), strict=True):
        copies = copies or copies_of(tensor.device)
        if tensor.numel():
            copies.follow_compute()  # for each tensor, as it may have been converted just now
            copies.copy(part.view(tensor.dtype), tensor.detach().contiguous().reshape(-1))
    if copies is not None:
        copies.mark().wait()
    for entry, found in zip(manifest.tensors, checksums(parts), strict=True):
        entry.sums_crc32 = found
