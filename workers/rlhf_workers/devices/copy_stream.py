"""Copies between a device and host memory, beside what the device computes: the seam that says what waits for what.

Rule: copies run in the order in which they were queued, on a stream of their own. They begin after all that the
computing stream had been given at the last `follow_compute`. Nobody reads a target, overwrites a source or frees
either before a `CopyMark` taken afterwards was waited for, by a thread (`wait`) or by the computing stream
(`hold_compute`). On a CPU a copy is made when it is queued, and the rest does nothing. Used by one thread at a time.
"""

from typing import Final, Protocol

import torch

HOST: Final = torch.device("cpu")


class CopyMark(Protocol):
    """A point in the order of copies."""

    def wait(self) -> None:
        """Blocks this thread, without holding Python's lock, until all copies before the mark are made."""

    def hold_compute(self) -> None:
        """What the computing stream is given from now on begins after the copies before the mark."""


class CopyStream(Protocol):
    """Queues copies of one device."""

    def follow_compute(self) -> None:
        """Later copies begin after what the computing stream was given so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues `target.copy_(source)`; types may differ, and are converted on the device."""

    def mark(self) -> CopyMark:
        """Return the point after all copies queued so far."""


class _Made:
    def wait(self) -> None:
        """Copies on a CPU are made when they are queued."""

    def hold_compute(self) -> None:
        """The same."""


class HostCopyStream:
    """Implements `CopyStream` where nothing leaves host memory."""

    def follow_compute(self) -> None:
        """A CPU has computed what it was given."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies at once."""
        target.copy_(source)

    def mark(self) -> CopyMark:
        """Everything is copied."""
        return _Made()


class _CudaMark:
    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaCopyStream:
    """Implements `CopyStream` with a CUDA stream. Host memory must be pinned, or each copy blocks its thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow_compute(self) -> None:
        """See CopyStream; the computing stream is the current one of this thread, which is every thread's default."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See CopyStream; memory of the computing stream is not given out again before the copy is made."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type == "cuda":
                tensor.record_stream(self._stream)

    def mark(self) -> CopyMark:
        """See CopyStream."""
        return _CudaMark(self._device, self._stream)


def copies_of(device: torch.device) -> CopyStream:
    """Return what copies to and from memory of `device`."""
    return CudaCopyStream(device) if device.type == "cuda" else HostCopyStream()
