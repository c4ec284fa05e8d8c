"""A CUDA driver on this process's memory with the calls of `CudaDriver`, to run code that needs no GPU.

It is as strict as the driver's documentation: calls need a current context, an exported allocation must not be freed
while it is open, a handle is opened by its exact bytes, and only allocated or opened memory is freed or closed.
"""

import ctypes
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_workers.shared_memory.cuda_driver import HANDLE_BYTES
from rlhf_workers.shared_memory.cuda_regions import GpuMemory

ERRORS = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 201: b"CUDA_ERROR_INVALID_CONTEXT"}


@dataclass
class StandInGpu:
    """Memory of one GPU, shared by the drivers of several processes."""

    capacity: int = 1 << 30
    blocks: dict[int, Any] = field(default_factory=dict)
    """Address -> its ctypes buffer."""
    handles: dict[bytes, int] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    """Address -> number of times it is open."""
    strict: bool = True
    """Whether freeing open memory is an error, which the real driver does not detect."""

    @property
    def used(self) -> int:
        """Return the allocated bytes."""
        return sum(len(block) for block in self.blocks.values())


class StandInDriver:
    """The equivalent of `ctypes.CDLL("libcuda.so.1")` for one process."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu = gpu
        self.contexts = 0
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """Call -> the error it returns from now on."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            needs_none = name.startswith(("cuInit", "cuDevice", "cuCtxPush", "cuGetErrorName"))
            if not needs_none and not self.contexts:
                return 201
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return call

    def _cuInit(self, flags: Any) -> None: ...  # noqa: N802 (the driver's names, here and below)

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> None:  # noqa: N802
        device._obj.value = ordinal.value

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        context._obj.value = 4096

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:  # noqa: N802
        assert context.value == 4096
        self.contexts += 1

    def _cuCtxPopCurrent_v2(self, former: Any) -> None:  # noqa: N802
        self.contexts -= 1

    def _cuCtxSynchronize(self) -> None: ...  # noqa: N802

    def _cuGetErrorName(self, error: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = ERRORS.get(error.value)
        return 0 if error.value in ERRORS else 1

    def _cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:  # noqa: N802
        if self.gpu.used + size.value > self.gpu.capacity:
            return 2
        block = (ctypes.c_ubyte * size.value)()
        pointer._obj.value = ctypes.addressof(block)
        self.gpu.blocks[pointer._obj.value] = block
        return 0

    def _cuMemFree_v2(self, pointer: Any) -> int:  # noqa: N802
        assert not (self.gpu.strict and self.gpu.opened.get(pointer.value)), "freed while a borrower has it open"
        return 0 if self.gpu.blocks.pop(pointer.value, None) is not None else 1

    def _cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:  # noqa: N802
        if pointer.value not in self.gpu.blocks:
            return 1
        handle_bytes = secrets.token_bytes(HANDLE_BYTES)
        self.gpu.handles[handle_bytes] = pointer.value
        ctypes.memmove(ctypes.addressof(handle._obj), handle_bytes, HANDLE_BYTES)
        return 0

    def _cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        address = self.gpu.handles.get(bytes(handle.reserved), 0)
        if address not in self.gpu.blocks:
            return 1
        self.gpu.opened[address] = self.gpu.opened.get(address, 0) + 1
        pointer._obj.value = address
        return 0

    def _cuIpcCloseMemHandle(self, pointer: Any) -> int:  # noqa: N802
        if not self.gpu.opened.get(pointer.value):
            return 1
        self.gpu.opened[pointer.value] -= 1
        return 0

    def _cuMemGetAddressRange_v2(self, first: Any, size: Any, pointer: Any) -> int:  # noqa: N802
        block = self.gpu.blocks.get(pointer.value)
        if block is None:
            return 1
        first._obj.value, size._obj.value = pointer.value, len(block)
        return 0

    def _cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> None: ...  # noqa: N802

    def _cuMemHostUnregister(self, address: Any) -> None: ...  # noqa: N802


class StandInDeviceMemory(GpuMemory):
    """Device memory whose tensors are CPU tensors in the stand-in's memory."""

    def __init__(self, uuid: str = "GPU-1") -> None:
        super().__init__(torch.device("cpu"))
        self.name = uuid
        self.cache_freed = 0

    def uuid(self) -> str:
        return self.name

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def free_cached(self) -> None:
        self.cache_freed += 1
