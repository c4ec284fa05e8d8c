"""GPU memory that two processes share: a separate allocation, opened by its CUDA IPC handle.

Rule: an allocation contains one region and nothing else (whole blocks of the driver), so its handle exposes nothing
else. A borrower opens handles of its own GPU, checks the size of the allocation, and waits for the device before it
closes it.
"""

import os
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.shared_memory.cuda_driver import GRANULE, HANDLE_BYTES, OUT_OF_MEMORY, CudaDriverError
from rlhf_workers.shared_memory.regions import LentRegion, Region, RegionRefusedError


class IpcDriver(Protocol):
    """The methods of `CudaDriver` used here."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def handle(self, address: int) -> bytes: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...
    def extent(self, address: int) -> tuple[int, int]: ...
    def finish(self) -> None: ...


class _DeviceBytes:
    """Presents bytes at a device address to torch as an array."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class GpuMemory:
    """GPU operations that these regions need, through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def uuid(self) -> str:
        """Return the unique name of the GPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """Return uint8 [size] over GPU memory; the tensor does not own it."""
        return torch.as_tensor(_DeviceBytes(address, size), device=self.device)

    def free_cached(self) -> None:
        """Return torch's cached memory to the device."""
        torch.cuda.empty_cache()


class _LentAllocation:
    """Implements `LentRegion`."""

    def __init__(self, owner: "CudaSharing", size: int) -> None:
        self._owner, self._size = owner, size
        self._address = owner.allocate_bytes(-(-max(size, 1) // GRANULE) * GRANULE)
        try:
            self.key = owner.driver.handle(self._address)
            self.memory = owner.gpu.tensor(self._address, max(size, 1))
        except BaseException as error:
            owner.driver.free(self._address)
            if isinstance(error, CudaDriverError):
                raise RegionRefusedError(f"memory of this GPU cannot be shared: {error}") from error
            raise

    def handle(self) -> pb.LentMemory:
        cuda = pb.CudaMemory(handle=self.key)
        return pb.LentMemory(place=self._owner.place, pid=os.getpid(), size=self.memory.shape[0], cuda=cuda)

    def close(self) -> None:
        if not self._address:
            return
        self._owner.forget(self.key)
        self._owner.driver.finish()
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._owner.driver.free(self._address)
        self._address = 0


class _OpenedAllocation:
    """Implements `Region`."""

    def __init__(self, owner: "CudaSharing", address: int, size: int) -> None:
        self._owner, self._address = owner, address
        self.memory = owner.gpu.tensor(address, size)

    def close(self) -> None:
        if not self._address:
            return
        self._owner.driver.finish()
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._owner.driver.close(self._address)
        self._address = 0


class _OwnAllocation:
    def __init__(self, owner: "CudaSharing", lent: _LentAllocation) -> None:
        self._owner = owner
        self.memory = lent.memory

    def close(self) -> None:
        self._owner.driver.finish()
        self.memory = torch.empty(0, dtype=torch.uint8)


class CudaSharing:
    """Implements `MemorySharing`."""

    kind = "device_memory"
    transient = True

    def __init__(self, driver: IpcDriver, gpu: GpuMemory) -> None:
        self.driver, self.gpu = driver, gpu
        self._lock = Lock()
        self._lent: dict[bytes, _LentAllocation] = {}

    @property
    def device(self) -> torch.device:
        """See MemorySharing."""
        return self.gpu.device

    @cached_property
    def place(self) -> pb.MemoryPlace:
        """See MemorySharing."""
        return pb.MemoryPlace(device=self.gpu.uuid())

    def lends(self, lent: pb.LentMemory) -> bool:
        """See MemorySharing."""
        return lent.HasField("cuda")

    def reaches(self, place: pb.MemoryPlace) -> bool:
        """See MemorySharing."""
        return bool(place.device) and place.device == self.place.device

    def allocate(self, size: int) -> LentRegion:
        """See MemorySharing."""
        lent = _LentAllocation(self, size)
        with self._lock:
            self._lent[lent.key] = lent
        return lent

    def open(self, lent: pb.LentMemory) -> Region:
        """See MemorySharing."""
        if not (self.reaches(lent.place) and self.lends(lent) and lent.size):
            raise RegionRefusedError("it is memory of another GPU")
        if len(lent.cuda.handle) != HANDLE_BYTES:
            raise RegionRefusedError(f"its handle has {len(lent.cuda.handle)} bytes, not {HANDLE_BYTES}")
        with self._lock:
            own = self._lent.get(lent.cuda.handle)
        if own is not None:
            if own.memory.shape[0] != lent.size:
                raise RegionRefusedError("this process lends no such memory")
            return _OwnAllocation(self, own)
        return self._open(lent)

    def _open(self, lent: pb.LentMemory) -> Region:
        try:
            address = self.driver.open(lent.cuda.handle)
        except CudaDriverError as error:
            raise RegionRefusedError(f"its memory cannot be opened here: {error}") from error
        try:
            first, size = self.driver.extent(address)
            if first != address or size < lent.size:
                raise RegionRefusedError(f"{lent.size} bytes are announced, {size} are there")
            return _OpenedAllocation(self, address, lent.size)
        except BaseException as error:
            self.driver.close(address)
            if isinstance(error, CudaDriverError):
                raise RegionRefusedError(f"its memory cannot be opened here: {error}") from error
            raise

    def allocate_bytes(self, size: int) -> int:
        """Allocate device memory, if necessary after emptying torch's cache; RegionRefusedError if that fails."""
        try:
            return self.driver.allocate(size)
        except CudaDriverError as error:
            if error.name != OUT_OF_MEMORY:
                raise RegionRefusedError(f"no {size} bytes of this GPU: {error}") from error
        self.gpu.free_cached()
        try:
            return self.driver.allocate(size)
        except CudaDriverError as error:
            raise RegionRefusedError(f"no {size} bytes of this GPU: {error}") from error

    def finish(self) -> None:
        """See MemorySharing."""
        self.driver.finish()

    def forget(self, key: bytes) -> None:
        """Remove a region of this process that is about to be freed."""
        with self._lock:
            self._lent.pop(key, None)
