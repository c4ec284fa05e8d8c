"""Interface of memory that one process lends and another maps, for host memory and GPU memory.

Rule: a handle is protobuf data, which the borrower checks; no pickled objects.
"""

from typing import Protocol

import torch

from rlhf_common import control_pb2 as pb


class RegionRefusedError(Exception):
    """Memory of this kind cannot be lent or mapped here; the message says why."""


class Region(Protocol):
    """A range of memory in this process's address space."""

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes, uint8 [size], contiguous, on the device of the region."""

    def close(self) -> None:
        """Release the region; `memory` and its views are invalid afterwards. Call it once."""


class LentRegion(Region, Protocol):
    """A region of this process that others may map."""

    def handle(self) -> pb.LentMemory:
        """Return the handle that others open."""


class MemorySharing(Protocol):
    """One kind of memory that can be lent and borrowed."""

    @property
    def kind(self) -> str:
        """Return its name for logs and metrics."""

    @property
    def device(self) -> torch.device:
        """Return the device of its regions."""

    @property
    def transient(self) -> bool:
        """Return whether a region is freed when its last reader ends, and may vanish with its lender."""

    @property
    def place(self) -> pb.MemoryPlace:
        """Return the place of regions that this process can map; empty if it can map none."""

    def lends(self, lent: pb.LentMemory) -> bool:
        """Return whether a region is of this kind."""

    def reaches(self, place: pb.MemoryPlace) -> bool:
        """Return whether a process at `place` may be able to map regions of this one."""

    def allocate(self, size: int) -> LentRegion:
        """Allocate a region of `size` bytes, with undefined content; RegionRefusedError if that fails."""

    def finish(self) -> None:
        """Wait for the copies from and to its regions that this process started."""

    def open(self, lent: pb.LentMemory) -> Region:
        """Map a region of another process, or find one of this process; RegionRefusedError if that fails."""
