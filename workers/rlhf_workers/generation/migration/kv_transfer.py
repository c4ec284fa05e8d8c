"""Sends one sample to another worker through its Receive call, fed by the compute thread.

Rule: the chunks follow only after the destination accepted the offer. Only a positive receipt means moved; a time-out
or a broken call means not moved, even if the destination took the sample.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import KvSinkStub
from rlhf_workers.generation.migration.kv_chunks import chunks
from rlhf_workers.models.kv_slices import KvSlice

TAKEN: Final = "rlhf-offer-taken"
"""Initial metadata with which a destination accepts the offer."""


@dataclass(frozen=True)
class TransferOutcome:
    """How a transfer ended."""

    moved: bool
    why: str
    """Reason if it was not moved."""
    at: float
    """Time when the transfer ended, in seconds of time.monotonic(); not used if no transfer began."""


class KvTransfer:
    """A transfer that the compute thread feeds and watches; gRPC's threads send it."""

    def __init__(self, channel: grpc.Channel, offer: pb.KvOffer, seconds: float) -> None:
        """Dial at once. `seconds` limits the whole transfer."""
        self.taken = False
        self.backlog = 0
        """Cache slices given and not yet sent."""
        self.bytes = 0
        """KV bytes sent."""
        self._offer = offer
        self._seconds = seconds
        self._pieces: queue.SimpleQueue[KvSlice | pb.KvHandOver | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outcome: TransferOutcome | None = None
        self._dialed = threading.Event()
        self._call = KvSinkStub(channel).Receive.future(self._parts(), timeout=seconds)
        self._dialed.set()
        self._call.add_done_callback(self._ended)

    @property
    def outcome(self) -> TransferOutcome | None:
        """Return how it ended; None while it runs."""
        with self._lock:
            return self._outcome

    def send(self, piece: KvSlice) -> None:
        """Queue the next positions to be sent."""
        with self._lock:
            self.backlog += 1
        self._pieces.put(piece)

    def hand_over(self, message: pb.KvHandOver) -> None:
        """Queue the last message, after the slices."""
        self._pieces.put(message)

    def cancel(self, why: str) -> bool:
        """End the transfer as not moved; return False if it had ended before."""
        if not self._end(TransferOutcome(False, why, time.monotonic())):
            return False
        self._call.cancel()
        return True

    # ------------------------------------------------------------ gRPC's threads

    def _parts(self) -> Iterator[pb.KvPart]:
        yield pb.KvPart(offer=self._offer)
        self._dialed.wait()
        metadata = self._call.initial_metadata() or ()
        if not any(name == TAKEN for name, _ in metadata):
            return  # the receipt gives the reason
        self.taken = True
        while True:
            piece = self._pieces.get()
            if piece is None:
                return
            if isinstance(piece, pb.KvHandOver):
                yield pb.KvPart(hand_over=piece)
                return
            for part in chunks(piece):
                yield part
                self.bytes += len(part.chunk.data.data)
            with self._lock:
                self.backlog -= 1

    def _ended(self, call: "grpc.Future[pb.KvReceipt]") -> None:
        now = time.monotonic()
        try:
            receipt = call.result(timeout=0)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            late = code == grpc.StatusCode.DEADLINE_EXCEEDED
            why = f"no receipt within {self._seconds:.1f} s" if late else f"{code.name.lower()}: {details}"
            self._end(TransferOutcome(False, why, now))
        except (grpc.FutureCancelledError, grpc.FutureTimeoutError):
            self._end(TransferOutcome(False, "the call was cancelled", now))
        else:
            self._end(TransferOutcome(receipt.accepted, receipt.why, now))

    def _end(self, outcome: TransferOutcome) -> bool:
        with self._lock:
            first = self._outcome is None
            if first:
                self._outcome = outcome
        self._pieces.put(None)
        return first
