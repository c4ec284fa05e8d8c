"""Host memory that two processes of one machine map: a sealed memory file in its owner's file descriptors.

Rule: a file is sealed against shrinking before its handle is sent. A borrower checks that it is a regular file with
these seals, the announced size and inode, and maps it for reading. Borrowers need the owner's PID namespace and user.
"""

import fcntl
import logging
import mmap
import os
import stat
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.shared_memory.regions import LentRegion, Region, RegionRefusedError

log = logging.getLogger(__name__)

BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
PROCESSES: Final = Path("/proc/self/ns/pid")
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MACHINE: Final = Path("/proc/meminfo")
CONTAINER: Final = Path("/sys/fs/cgroup")
SPARE_SHARE: Final = 2
"""Divisor of the free bytes that gives the largest region to lend; reaching the memory limit would kill the process."""
KEPT: Final = 16
"""Maximum pinned regions of other processes that stay mapped without a reader."""
HOST: Final = torch.device("cpu")
PRIVATE: Final = -1
"""File descriptor for memory without a file."""


class Pinning(Protocol):
    """Pins host memory, so that a device copies at the speed of the bus."""

    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        """Pin the memory; OSError if that fails."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def finish(self) -> None:
        """Wait for all copies that this process started on the device."""


def host_place() -> str:
    """Return the boot id and PID namespace, which a borrower must share; empty if unknown."""
    try:
        return f"{BOOT.read_text().strip()} {PROCESSES.readlink()}"
    except OSError:
        return ""


def spare_bytes() -> int:
    """Return an estimate of the bytes that the machine and the container's cgroup have free.

    Cached files that can be dropped count as free.
    """
    spare = _number(MACHINE, "MemAvailable:") * 1024
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text()) - _number(CONTAINER / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return spare
    return min(spare, max(int(limit) - used, 0)) if limit.isdigit() else spare


def _number(file: Path, name: str) -> int:
    """Return the number after a name in a file of lines; 0 if there is none."""
    rows = (line.split() for line in file.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


class MappedMemory:
    """A mapped memory file, or anonymous memory; pinned on request."""

    def __init__(self, descriptor: int, size: int, pinning: Pinning | None, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        populate = 0 if writable else mmap.MAP_POPULATE
        self._map: mmap.mmap | None = mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate, protection)
        with warnings.catch_warnings():  # a borrower reads only
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self.memory.data_ptr()
        self._pinning: Pinning | None = None
        if pinning is not None:
            try:
                pinning.pin(self._address, size, read_only=not writable)
                self._pinning = pinning
            except OSError as error:
                log.warning("%d bytes of host memory are not pinned, copies will be slower: %s", size, error)

    @property
    def pinned(self) -> bool:
        """Whether a device copies from it at the speed of the bus."""
        return self._pinning is not None

    def close(self) -> None:
        """Unpin the memory; it is unmapped when its last view ends."""
        if self._map is None:
            return
        if self._pinning is not None:
            self._pinning.unpin(self._address)
        self._map, self.memory = None, torch.empty(0, dtype=torch.uint8)


class _Lent:
    """Implements `LentRegion`."""

    def __init__(self, owner: "HostSharing", size: int) -> None:
        self._owner, self._size = owner, size
        self._descriptor = os.memfd_create("rlhf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._mapped = MappedMemory(self._descriptor, size, owner.pinning, writable=True)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.inode = os.fstat(self._descriptor).st_ino

    @property
    def memory(self) -> torch.Tensor:
        return self._mapped.memory

    def handle(self) -> pb.LentMemory:
        host = pb.HostMemory(descriptor=self._descriptor, inode=self.inode)
        return pb.LentMemory(place=pb.MemoryPlace(host=self._owner.host), pid=os.getpid(), size=self._size, host=host)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self._owner.forget(self.inode)
        self._mapped.close()
        os.close(self._descriptor)
        self._descriptor = -1


class _Own:
    """A region of this process that it borrows itself."""

    def __init__(self, lent: _Lent) -> None:
        self.memory = lent.memory

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


class _Borrowed:
    def __init__(self, owner: "HostSharing", key: tuple[int, int], mapped: MappedMemory) -> None:
        self._owner, self._key, self._mapped = owner, key, mapped

    @property
    def memory(self) -> torch.Tensor:
        return self._mapped.memory

    def close(self) -> None:
        self._owner.give_back(self._key, self._mapped)


class HostSharing:
    """Implements `MemorySharing`."""

    kind = "host_memory"
    transient = False
    device = HOST

    def __init__(self, pinning: Pinning | None = None, spare: Callable[[], int] = spare_bytes) -> None:
        """`pinning` pins for the device that copies the regions; None leaves them unpinned."""
        self._spare = spare
        self.host = host_place()
        self.pinning = pinning
        self._lock = Lock()
        self._lent: dict[int, _Lent] = {}
        self._kept: OrderedDict[tuple[int, int], MappedMemory] = OrderedDict()

    @property
    def place(self) -> pb.MemoryPlace:
        """See MemorySharing."""
        return pb.MemoryPlace(host=self.host)

    def lends(self, lent: pb.LentMemory) -> bool:
        """See MemorySharing."""
        return lent.HasField("host")

    def reaches(self, place: pb.MemoryPlace) -> bool:
        """See MemorySharing."""
        return bool(self.host) and place.host == self.host

    def allocate(self, size: int) -> LentRegion:
        """See MemorySharing. Refuse more than a share of the free memory, so that lending does not exhaust it."""
        spare = self._spare()
        if size > spare // SPARE_SHARE:
            raise RegionRefusedError(f"{size} bytes are more than half of the {spare} bytes of memory that are free")
        try:
            lent = _Lent(self, max(size, 1))
        except OSError as error:
            raise RegionRefusedError(f"no {size} bytes of shared memory: {error}") from error
        with self._lock:
            self._lent[lent.inode] = lent
        return lent

    def open(self, lent: pb.LentMemory) -> Region:
        """See MemorySharing."""
        if not (self.reaches(lent.place) and self.lends(lent) and lent.size):
            raise RegionRefusedError("it is memory of another host or PID namespace")
        if lent.pid == os.getpid():
            with self._lock:
                own = self._lent.get(lent.host.inode)
            if own is None or own.memory.shape[0] != lent.size:
                raise RegionRefusedError("this process lends no such memory")
            return _Own(own)
        key = lent.pid, lent.host.inode
        with self._lock:
            cached = self._kept.pop(key, None)
        if cached is not None and cached.memory.shape[0] == lent.size:
            return _Borrowed(self, key, cached)
        return _Borrowed(self, key, _map(lent, self.pinning))

    def finish(self) -> None:
        """See MemorySharing."""
        if self.pinning is not None:
            self.pinning.finish()

    def forget(self, inode: int) -> None:
        """Remove a region of this process that is about to be closed."""
        with self._lock:
            self._lent.pop(inode, None)

    def give_back(self, key: tuple[int, int], mapped: MappedMemory) -> None:
        """Release a borrowed region; pinned ones stay mapped up to a number, because pinning is slow."""
        surplus = [mapped]
        if mapped.pinned:
            with self._lock:
                surplus = [self._kept.pop(key)] if key in self._kept else []
                self._kept[key] = mapped
                while len(self._kept) > KEPT:
                    surplus.append(self._kept.popitem(last=False)[1])
        for unused in surplus:
            unused.close()


def _map(lent: pb.LentMemory, pinning: Pinning | None) -> MappedMemory:
    path = f"/proc/{lent.pid}/fd/{lent.host.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RegionRefusedError(f"the lender's memory cannot be opened: {error}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (lent.host.inode, lent.size):
            raise RegionRefusedError("the lender's descriptor is another file by now")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise RegionRefusedError("the lender could cut its memory off while it is read")
        return MappedMemory(descriptor, lent.size, pinning, writable=False)
    except OSError as error:
        raise RegionRefusedError(f"the lender's memory cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
