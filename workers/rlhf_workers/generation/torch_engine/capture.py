"""Captures a function that launches the same kernels on the same memory every time, for cheap replays.

Rule: a captured function uses fixed memory, has run before, and never waits for the device. Must never leave a stream
in a capture.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

Run = Callable[[], None]


class Captured(NamedTuple):
    """A replayable function."""

    replay: Run
    bytes: int
    """Growth of reserved device memory during the capture, in bytes."""


class CaptureError(Exception):
    """The function cannot be captured; it can still be called."""


class Capture(Protocol):
    """A way to make a function replayable."""

    def capture(self, function: Run) -> Captured:
        """Return the captured function; CaptureError with the reason if that fails."""

    def clear(self) -> None:
        """Let go of the memory of earlier captures, which must not be replayed again."""


class DirectCapture:
    """Replays by calling the function."""

    def capture(self, function: Run) -> Captured:
        """See Capture."""
        return Captured(function, 0)

    def clear(self) -> None:
        """See Capture."""


class CudaGraphCapture:
    """Records the launches as a CUDA graph.

    Graphs since the last `clear` share the memory of their intermediate results, so they must replay one after the
    other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Run) -> Captured:
        """See Capture. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream(self._device).synchronize()
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                function()
            except Exception as error:
                _abandon(graph)
                raise CaptureError(f"{type(error).__name__}: {_first_line(error)}") from error
            try:
                graph.capture_end()
            except RuntimeError as error:
                raise CaptureError(_first_line(error)) from error
        return Captured(graph.replay, max(torch.cuda.memory_reserved(self._device) - before, 0))

    def clear(self) -> None:
        """See Capture. A pool whose graphs are gone is never captured into again."""
        self._pool = torch.cuda.graph_pool_handle()


def capture_for(device: torch.device) -> Capture:
    """Return the capture method of a device."""
    return CudaGraphCapture(device) if device.type == "cuda" and torch.cuda.is_initialized() else DirectCapture()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose function failed; ending it may fail for the same reason."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
