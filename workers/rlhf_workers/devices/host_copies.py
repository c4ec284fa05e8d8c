"""Copies between numpy and a device without blocking the host, and the duration of device work."""

import time
from typing import Any, Final

import numpy.typing as npt
import torch

NS_PER_MS: Final = 1e6
"""Nanoseconds per millisecond, the unit of CUDA events."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array on `device`; on a GPU it is complete before work that this thread launches next."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_initialized():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done everything on this thread's current stream; at once on a CPU."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.current_stream(device).synchronize()


class CopyToHost:
    """A copy of a tensor to host memory in progress."""

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """`into`: pinned memory of the same size and type, in which `wait` returns the values; None allocates some."""
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
        """Return the values once they are complete: the tensor's own memory on a CPU, else `into` if it was given."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class Stopwatch:
    """Device time of the work launched between `start` and `stop`, host time on a CPU; only reading it waits."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and torch.cuda.is_initialized():
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stream = torch.cuda.current_stream(device)
        self._started = self._stopped = 0

    def start(self) -> None:
        """Mark the start."""
        self._started = time.perf_counter_ns()
        if self._events is not None:
            self._events[0].record(self._stream)

    def stop(self) -> None:
        """Mark the end."""
        self._stopped = time.perf_counter_ns()
        if self._events is not None:
            self._events[1].record(self._stream)

    def read_ns(self) -> int:
        """Return the nanoseconds in between, once the device has reached the end."""
        if self._events is None:
            return self._stopped - self._started
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * NS_PER_MS)
