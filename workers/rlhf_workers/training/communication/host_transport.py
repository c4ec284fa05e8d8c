"""The communicator of a group that NCCL cannot connect, such as ranks that share a GPU: tensors cross through host
memory, over gloo.

Sends and receives do not block; other operations do. Rule: a pair of ranks has one thread per direction, so the k-th
send matches the k-th receive. A receive buffer is written only after the work that was launched before the receive was
posted.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_workers.training.communication.communicator import Communicator, Handle, RowCounts
from rlhf_workers.training.communication.transport import GroupTransport

Wait = Callable[[], None]


@dataclass(frozen=True)
class HostCopy:
    """A tensor in transit to host memory."""

    host: torch.Tensor
    wait: Wait
    """Blocks the calling thread until `host` has the data."""


class DeviceCopies(Protocol):
    """Copies between a device and host memory. The thread that launches work calls `to_host` and `mark`."""

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy `tensor` after the work launched so far; it must not change before the copy is complete."""

    def mark(self) -> Any:
        """Return the current position in the order of work; `to_device` copies after it."""

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory into which `tensor` can be received."""

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, behind: Any) -> Wait:
        """Start to copy `host` into `tensor`. The returned function makes later work wait for the copy."""


class CpuCopies:
    """Immediate copies within host memory."""

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return HostCopy(tensor.clone(), lambda: None)

    def mark(self) -> None: ...

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, behind: Any) -> Wait:
        tensor.copy_(host)
        return lambda: None


class CudaCopies:
    """Copies through pinned memory, on one stream per direction.

    PyTorch's caching allocator reuses a pinned block only after the copies that use it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        host = self.buffer(tensor)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            copied.record(self._out)
        return HostCopy(host, copied.synchronize)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, behind: torch.cuda.Event) -> Wait:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._in):  # a setting of the calling thread
            self._in.wait_event(behind)
            tensor.copy_(host, non_blocking=True)
            copied.record(self._in)
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


class HostCommunicator:
    """Implements `Communicator` with another communicator for host memory."""

    def __init__(self, inner: Communicator, copies: DeviceCopies, transport: GroupTransport) -> None:
        """`inner` connects the same ranks over gloo."""
        self.transport = transport
        self._inner, self._copies = inner, copies
        self._couriers: dict[tuple[str, int], _Courier] = {}

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        copy = self._copies.to_host(tensor)

        def deliver() -> Wait:
            copy.wait()
            self._inner.send(copy.host, peer).wait()
            return lambda: None

        return _CarriedTransfer(self._courier("send", peer).do(deliver), tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> Handle:
        host, behind = self._copies.buffer(tensor), self._copies.mark()

        def fetch() -> Wait:
            self._inner.receive(host, peer).wait()
            return self._copies.to_device(host, tensor, behind)

        return _CarriedTransfer(self._courier("receive", peer).do(fetch), tensor)

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._reduce(tensor, ranks, self._inner.all_reduce_sum)

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._reduce(tensor, ranks, self._inner.all_reduce_max)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        host = torch.empty(whole.shape, dtype=whole.dtype)
        self._inner.all_gather(host, own.to("cpu", copy=True), ranks)
        whole.copy_(host)

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        host = torch.empty(own.shape, dtype=own.dtype)
        self._inner.reduce_scatter_sum(host, whole.to("cpu", copy=True), ranks)
        own.copy_(host)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            host = tensor.to("cpu", copy=True)
            self._inner.broadcast(host, source, ranks)
            tensor.copy_(host)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]) -> None:
        host = torch.empty(received.shape, dtype=received.dtype)
        self._inner.all_to_all(host, sent.to("cpu", copy=True), rows, ranks)
        received.copy_(host)

    @staticmethod
    def _reduce(
        tensor: torch.Tensor, ranks: tuple[int, ...], reduce: Callable[[torch.Tensor, tuple[int, ...]], None]
    ) -> None:
        """Reduce a copy of the whole tensor in host memory, and copy the result back."""
        if len(ranks) > 1:
            host = tensor.to("cpu", copy=True)
            reduce(host, ranks)
            tensor.copy_(host)

    def _courier(self, direction: str, peer: int) -> "_Courier":
        return self._couriers.setdefault((direction, peer), _Courier(f"{direction}-{peer}"))


class _CarriedTransfer:
    """A transfer of a courier; it references its tensor, so that the memory is not reused."""

    def __init__(self, over: "Future[Wait]", tensor: torch.Tensor) -> None:
        self._over, self._tensor = over, tensor

    def wait(self) -> None:
        self._over.result()()  # the transfer itself has a time-out and names its peer

    def is_completed(self) -> bool:
        return self._over.done()


class _Courier:
    """Runs one direction's transfers with one peer, in order, on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Wait], Future[Wait]]] = queue.SimpleQueue()
        self._started = False

    def do(self, work: Callable[[], Wait]) -> "Future[Wait]":
        """Queue a transfer."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=f"transfer-{self._name}", daemon=True).start()
        over: Future[Wait] = Future()
        self._work.put((work, over))
        return over

    def _run(self) -> None:
        while True:
            work, over = self._work.get()
            try:
                over.set_result(work())
            except BaseException as error:  # the waiting thread must get it
                over.set_exception(error)
            del work, over  # otherwise the last transfer's memory stays until the next one
