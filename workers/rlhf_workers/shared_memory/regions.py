"""What memory is that one process lends and another maps: the seam between host memory and a GPU's.

Rule: a handle is data of the wire, with bounds that the borrower checks; whatever does not fit is refused with
RegionRefusedError, and whoever asked goes another way. Must never carry pickled objects.
"""

from typing import Protocol

import torch

from rlhf_common import control_pb2 as pb


class RegionRefusedError(Exception):
    """Memory of this kind cannot be lent or mapped here; the message says why."""


class Region(Protocol):
    """A stretch of memory in this process's address space."""

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes, uint8 [size], contiguous, where they are."""

    def close(self) -> None:
        """Gives it up; `memory` and views of it must not be used afterwards. Twice is once."""


class LentRegion(Region, Protocol):
    """A region of this process that others may map."""

    def handle(self) -> pb.LentMemory:
        """Return how others find it."""


class MemorySharing(Protocol):
    """One kind of memory that can be lent and borrowed."""

    @property
    def kind(self) -> str:
        """Return its name for logs and metrics."""

    @property
    def device(self) -> torch.device:
        """Return where its regions are."""

    @property
    def transient(self) -> bool:
        """Return whether a region is freed as soon as nobody reads it, and may be gone when its lender is."""

    @property
    def place(self) -> pb.MemoryPlace:
        """Return which regions this process can map; empty where it can map none."""

    def lends(self, lent: pb.LentMemory) -> bool:
        """Return whether a region is of this kind."""

    def reaches(self, place: pb.MemoryPlace) -> bool:
        """Return whether a process at `place` may be able to map regions of this one."""

    def allocate(self, size: int) -> LentRegion:
        """A region of so many bytes, their content undefined; RegionRefusedError when there is no memory."""

    def finish(self) -> None:
        """Waits until copies from and to its regions that this process began are made."""

    def open(self, lent: pb.LentMemory) -> Region:
        """Maps a region of another process, or finds one of this; RegionRefusedError when that is not possible."""
