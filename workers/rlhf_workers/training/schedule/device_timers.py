"""Start and end of a mini-batch's steps on devices that run behind the host.

Rule: marking never waits; reading waits once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class DeviceTimers(Protocol):
    """Marks points in the work that one thread launches, and reads their times."""

    def mark(self) -> Any:
        """Return a mark: the moment when the device has done all work launched so far."""

    def read(self, marks: Sequence[Any]) -> list[int]:
        """Return the times of the marks in ns of the clock, once the device has passed them all."""


class HostTimers:
    """Timers of a device that works while the caller waits, such as a CPU."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        """`clock` returns nanoseconds, by default since the epoch."""
        self.mark = clock

    def read(self, marks: Sequence[Any]) -> list[int]:
        return list(marks)


class CudaTimers:
    """Timers with events of the current stream."""

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
    """Return the timers of a device."""
    return CudaTimers(device) if device.type == "cuda" else HostTimers()
