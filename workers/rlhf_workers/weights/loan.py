"""Borrows one peer's weights: maps its memory, checks the tensors there, and returns the memory after the read.

Rule: memory that cannot be used is a LoanRefusedError before the caller gets a tensor. If the peer's process ends, host
memory stays readable, but `confirm` rejects reads of its device memory.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import channel
from rlhf_common.control_pb2_grpc import WeightSourceStub
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.shared_memory.checksums import checksums
from rlhf_workers.shared_memory.regions import MemorySharing, RegionRefusedError
from rlhf_workers.weights.manifest import WeightManifestError, check, check_places, places, shaped
from rlhf_workers.weights.stream import WeightsRefusedError

RETURN_SECONDS: Final = 5.0
"""Seconds for the peer to learn that its memory was read; it also notices a closed connection."""


class LoanRefusedError(Exception):
    """The peer's memory cannot be read; the message says why."""


class BorrowedWeights:
    """Tensors in a peer's memory, until `close`."""

    def __init__(self, tensors: dict[str, torch.Tensor], sharing: MemorySharing, address: str, call: grpc.Call) -> None:
        self.tensors = tensors
        self.kind = sharing.kind
        self._sharing = sharing
        self._address = address
        self._call = call
        self._closing = ExitStack()

    def on_close(self, close: Callable[[], Any]) -> None:
        """Add a step of `close`; the last added runs first."""
        self._closing.callback(close)

    def confirm(self) -> None:
        """Check after the last read; WorkError WeightsTorn if the loan of transient memory ended before."""
        self._sharing.finish()
        if self._sharing.transient and not self._call.is_active():
            message = f"{self._address} ended the loan of its {self.kind} while weights were copied from it"
            raise WorkError("WeightsTorn", message, retryable=True, exit_code=ExitCode.RESTART)

    def close(self) -> None:
        """Return the memory, once copies from it are complete."""
        self.tensors = {}
        self._sharing.finish()
        self._closing.close()


def borrow(
    model: str,
    version: int,
    address: str,
    certificates: Path | None,
    sharings: Sequence[MemorySharing],
    seconds: float,
) -> BorrowedWeights:
    """Borrow the weights in a peer's memory.

    `seconds`: time for the peer to copy its weights there.

    Raises LoanRefusedError without a usable loan, and WeightsRefusedError when the peer cannot serve the version.
    """
    place = pb.MemoryPlace()
    for sharing in sharings:
        place.MergeFrom(sharing.place)
    request = pb.WeightLoanRequest(weights=pb.WeightRequest(model=model, version=version), reader=place)
    with ExitStack() as stack:
        peer = stack.enter_context(channel(address, certificates))
        said: queue.SimpleQueue[pb.WeightLoanRequest | None] = queue.SimpleQueue()
        said.put(request)
        call = WeightSourceStub(peer).Lend(iter(said.get, None))
        stack.callback(_end, call, said)
        loan = _first(call, seconds, model)
        try:
            tensors, sharing = _tensors(loan, version, sharings, stack)
        except (WeightManifestError, RegionRefusedError) as error:
            raise LoanRefusedError(str(error)) from error
        borrowed = BorrowedWeights(tensors, sharing, address, call)
        borrowed.on_close(stack.pop_all().close)
        return borrowed


def _first(call: Any, seconds: float, model: str) -> pb.WeightLoan:
    timer = threading.Timer(seconds, call.cancel)
    timer.start()
    try:
        loan: pb.WeightLoan = next(call)
    except StopIteration:
        raise LoanRefusedError("the peer ended the call without an answer") from None
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            raise WeightsRefusedError("WeightsUnavailable", details, retryable=True) from error
        why = f"no loan of {model} within {seconds:g} s" if code == grpc.StatusCode.CANCELLED else details
        raise LoanRefusedError(f"{code.name.lower().replace('_', ' ')}: {why}") from error
    finally:
        timer.cancel()
    return loan


def _tensors(
    loan: pb.WeightLoan, version: int, sharings: Sequence[MemorySharing], stack: ExitStack
) -> tuple[dict[str, torch.Tensor], MemorySharing]:
    manifest = loan.manifest
    if manifest.version != version:
        raise WeightManifestError(f"it lends version {manifest.version}")
    check(manifest)
    check_places(manifest, loan.memory.size)
    sharing = next((candidate for candidate in sharings if candidate.lends(loan.memory)), None)
    if sharing is None:
        raise RegionRefusedError("it lends memory of a kind that is not used here")
    region = sharing.open(loan.memory)
    stack.callback(region.close)
    parts = places(manifest, region.memory)
    for entry, found in zip(manifest.tensors, checksums(parts), strict=True):
        if found != entry.sums_crc32:
            raise WeightManifestError(f"checksum of {entry.name} is {found:08x}, announced {entry.sums_crc32:08x}")
    return shaped(manifest, parts), sharing


def _end(call: Any, said: "queue.SimpleQueue[pb.WeightLoanRequest | None]") -> None:
    """Tell the peer that the read is over, and wait briefly until it has ended the call."""
    said.put(pb.WeightLoanRequest(read=True))
    said.put(None)
    timer = threading.Timer(RETURN_SECONDS, call.cancel)
    timer.start()
    try:
        for _ in _until_broken(call):
            pass
    finally:
        timer.cancel()


def _until_broken(call: Any) -> Iterator[Any]:
    try:
        yield from call
    except grpc.RpcError:
        return
