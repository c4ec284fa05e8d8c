"""Numbers between numpy and a device, without stopping the host, and how long a device worked.

Rule: what goes to a GPU is staged in pinned memory, which torch's allocator keeps until the copy is through, and the
copy is queued behind what was launched before it; what comes back is pinned too and read only after `wait`. A copy
that waits would stop the host at every array, and one from pageable memory always waits. On a CPU nothing is copied
that need not be. Must never read the clock of the host for work that a device has not finished.
"""

import time
from typing import Any, Final

import numpy.typing as npt
import torch

NS_PER_MS: Final = 1e6
"""CUDA events count in milliseconds."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array on `device`; on a GPU it is there when the work launched next runs."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_initialized():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def wait_for(device: torch.device) -> None:
    """Returns when everything this thread has launched on `device` is done; at once on a CPU."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.current_stream(device).synchronize()


class CopyToHost:
    """A tensor on its way to host memory."""

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """`into` is pinned memory of the same size and type, the caller's until `wait` returned; None takes some."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            pinned = torch.cuda.is_initialized()
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) if into is None else into
            self._host.copy_(tensor, non_blocking=True)
            if pinned:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> npt.NDArray[Any]:
        """Return the numbers once they are there: the tensor's own memory on a CPU, `into` where it was given."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class Stopwatch:
    """How long what is launched between `start` and `stop` takes a device; reading it is what waits."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and torch.cuda.is_initialized():
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stream = torch.cuda.current_stream(device)
        self._started = self._stopped = 0

    def start(self) -> None:
        """Marks the beginning."""
        self._started = time.perf_counter_ns()
        if self._events is not None:
            self._events[0].record(self._stream)

    def stop(self) -> None:
        """Marks the end."""
        self._stopped = time.perf_counter_ns()
        if self._events is not None:
            self._events[1].record(self._stream)

    def read_ns(self) -> int:
        """Return the nanoseconds between, when the device has come that far."""
        if self._events is None:
            return self._stopped - self._started
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * NS_PER_MS)
