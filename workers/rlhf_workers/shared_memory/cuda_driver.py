"""The few calls of the CUDA driver that torch does not offer: memory of its own to share, pinned memory of any size.

The driver and not the runtime, because libcuda.so.1 is one library with one name wherever there is a GPU, and because
a call that fails there leaves no error behind for the next kernel launch to find. Rule: every call runs in the primary
context of its device, which torch uses as well; a call that fails is a CudaDriverError with the driver's name for it.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
HANDLE_BYTES: Final = 64
"""Of a CUipcMemHandle."""
GRANULE: Final = 2 * 1024 * 1024
"""Bytes: smaller allocations share a block with others, and an exported handle would show those, too."""
MOST_PINNED_AT_ONCE: Final = 64 * 2**30
"""Bytes of one registration; recent drivers refuse several hundred GiB, whose page table is too large for them."""
OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE: Final = 1
_READ_ONLY: Final = 8


class CudaDriverError(OSError):
    """A call failed; `name` is CUDA_ERROR_..."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Calls on one device. Thread-safe."""

    def __init__(self, ordinal: int, library: Any = None) -> None:
        """`ordinal` counts the devices this process sees, as torch does. CudaDriverError when there is no driver."""
        try:
            self._library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as error:
            raise CudaDriverError(LIBRARY, str(error)) from error
        self._lock = threading.Lock()
        self._ordinal = ordinal
        self._context: ctypes.c_void_p | None = None

    def allocate(self, size: int) -> int:
        """Return the address of so many bytes on the device."""
        pointer = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, address: int) -> None:
        """Frees what `allocate` gave."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """Return what another process opens an allocation with."""
        handle = IpcHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of an allocation of another."""
        pointer = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        with self._current():
            opened = IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, flags)
        return pointer.value

    def close(self, address: int) -> None:
        """Undoes `open`."""
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def extent(self, address: int) -> tuple[int, int]:
        """Return the first address and the size of the allocation that holds an address."""
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(address))
        return first.value, size.value

    def finish(self) -> None:
        """Waits for all that this process has given the device."""
        with self._current():
            self._call("cuCtxSynchronize")

    def pin(self, address: int, size: int, *, read_only: bool) -> None:
        """Makes host memory known to the device, which then copies from and to it by itself. See `Pinning`."""
        if size > MOST_PINNED_AT_ONCE:
            raise CudaDriverError("cuMemHostRegister_v2", f"{size} bytes are more than is pinned at once")
        flags = ctypes.c_uint(_PORTABLE | (_READ_ONLY if read_only else 0))
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), flags)

    def unpin(self, address: int) -> None:
        """Undoes `pin`."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Inside, the device's primary context is this thread's."""
        former = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._primary())
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(former))

    def _primary(self) -> ctypes.c_void_p:
        """The context, kept until the process ends: what was allocated in it would go with it."""
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
            known = self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text)) == 0
            raise CudaDriverError(name, (text.value or b"").decode() if known else f"error {result}")
