"""Copies between a device and host memory during computation, with their order of waits.

Rule: copies run in queue order on their own stream, after the work that the computing stream had at the last
`follow_compute`. Wait for a later `CopyMark`, by `wait` or `hold_compute`, before reading a target, overwriting a
source, or freeing either.
"""

from typing import Final, Protocol

import torch

HOST: Final = torch.device("cpu")


class CopyMark(Protocol):
    """A point in the order of copies."""

    def wait(self) -> None:
        """Block this thread, without Python's lock, until all copies before the mark are complete."""

    def hold_compute(self) -> None:
        """Make later work of the computing stream start after the copies before the mark."""


class CopyStream(Protocol):
    """Queues copies of one device."""

    def follow_compute(self) -> None:
        """Make later copies start after the current work of the computing stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue `target.copy_(source)`; types may differ."""

    def mark(self) -> CopyMark:
        """Return the point after all copies queued so far."""


class _Made:
    def wait(self) -> None:
        """Do nothing: copies on a CPU are immediate."""

    def hold_compute(self) -> None:
        """Do nothing, as in `wait`."""


class HostCopyStream:
    """Implements `CopyStream` for copies within host memory."""

    def follow_compute(self) -> None:
        """Do nothing: a CPU has no pending work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def mark(self) -> CopyMark:
        """Return a mark whose copies are complete."""
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
    """Implements `CopyStream` with a CUDA stream. Host memory must be pinned, or a copy may block its thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow_compute(self) -> None:
        """See CopyStream; the computing stream is the current one of this thread, by default the same for all
        threads."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See CopyStream; memory of the computing stream is not reused before the copy is complete."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type == "cuda":
                tensor.record_stream(self._stream)

    def mark(self) -> CopyMark:
        """See CopyStream."""
        return _CudaMark(self._device, self._stream)


def copies_of(device: torch.device) -> CopyStream:
    """Return a new copy stream for memory of `device`."""
    return CudaCopyStream(device) if device.type == "cuda" else HostCopyStream()
