"""Calls of the CUDA driver: shareable device memory, and pinning of host memory that exists already.

They use the driver and not the runtime, whose failed calls leave an error for the next kernel launch. Rule: calls on a
device run in its primary context, which torch also uses.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
HANDLE_BYTES: Final = 64
"""Size of a CUipcMemHandle in bytes."""
GRANULE: Final = 2 * 1024 * 1024
"""Allocation unit in bytes. Smaller allocations share a block, and an exported handle would expose its neighbours."""
MOST_PINNED_AT_ONCE: Final = 64 * 2**30
"""Maximum bytes of one registration."""
OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE: Final = 1
_READ_ONLY: Final = 8


class CudaDriverError(OSError):
    """A driver call failed or was refused; `name` is CUDA_ERROR_... or another text."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Calls on one device. Thread-safe."""

    def __init__(self, ordinal: int, library: Any = None) -> None:
        """`ordinal` counts the visible devices, as in torch. Raises CudaDriverError without a driver."""
        try:
            self._library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as error:
            raise CudaDriverError(LIBRARY, str(error)) from error
        self._lock = threading.Lock()
        self._ordinal = ordinal
        self._context: ctypes.c_void_p | None = None

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes on the device; return their address."""
        pointer = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, address: int) -> None:
        """Free an allocation of `allocate`."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """Return the IPC handle of an allocation."""
        handle = IpcHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Open another process's allocation; return its address in this process."""
        pointer = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        with self._current():
            opened = IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, flags)
        return pointer.value

    def close(self, address: int) -> None:
        """Undo `open`."""
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def extent(self, address: int) -> tuple[int, int]:
        """Return the first address and the size of the allocation that contains an address."""
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(address))
        return first.value, size.value

    def finish(self) -> None:
        """Wait for all work of this process on the device."""
        with self._current():
            self._call("cuCtxSynchronize")

    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        """Pin host memory for copies by the device. See `Pinning`."""
        if size > MOST_PINNED_AT_ONCE:
            raise CudaDriverError("cuMemHostRegister_v2", f"{size} bytes are more than is pinned at once")
        flags = ctypes.c_uint(_PORTABLE | (_READ_ONLY if read_only else 0))
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), flags)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's primary context current in this thread."""
        former = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._primary())
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(former))

    def _primary(self) -> ctypes.c_void_p:
        """Return the primary context; it lasts until the process ends, as its allocations would end with it."""
        with self._lock:
            if self._context is None:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuInit", ctypes.c_uint(0))
                self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._ordinal))
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._context = context
            return self._context

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            named = self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text)) == 0
            raise CudaDriverError(name, (text.value or b"").decode() if named else f"error {result}")
