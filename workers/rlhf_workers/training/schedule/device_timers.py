"""When steps of a mini-batch began and ended, on devices that run behind the host.

A GPU is given work far ahead of doing it. To time its steps by the host's clock the host would have to wait for each,
and the GPU would run dry between any two. So a mark is an event in the order of the GPU's own work, and all marks are
read at once at the end of a mini-batch: what they tell is when kernels ran, gaps in which none was ready included.

Rule: marking never waits; reading waits once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class DeviceTimers(Protocol):
    """Moments of one thread's work."""

    def mark(self) -> Any:
        """Return a mark: the moment when all work given to the device so far is done."""

    def read(self, marks: Sequence[Any]) -> list[int]:
        """Return the marks in ns of the clock, once the device has passed them all."""


class HostTimers:
    """For a device that works while the caller waits, such as a CPU."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        """`clock` gives ns since the epoch, which timelines need; or CPU time of this thread, which other processes
        barely change."""
        self.mark = clock

    def read(self, marks: Sequence[Any]) -> list[int]:
        return list(marks)


class CudaTimers:
    """By events of the current stream."""

    def __init__(self, device: torch.device, clock: Callable[[], int] = time.time_ns) -> None:
        self._device, self._clock = device, clock

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[int]:
        last = self.mark()
        last.synchronize()
        now = self._clock()
        return [now - round(mark.elapsed_time(last) * 1e6) for mark in marks]


def timers_for(device: torch.device) -> DeviceTimers:
    """Return the marks of a device's work."""
    return CudaTimers(device) if device.type == "cuda" else HostTimers()
