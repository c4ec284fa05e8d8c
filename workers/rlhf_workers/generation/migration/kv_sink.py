"""KvSink service: receives samples with their KV caches from other workers, for the compute thread.

Rule: the cache is joined here, and given to the compute thread complete. The receipt says accepted only when the sample
is admitted there. Must never call a role from the event loop.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import KvSinkServicer
from rlhf_common.samples import SampleKey
from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.migration.kv_chunks import IncomingCache, KvRefusedError
from rlhf_workers.generation.migration.kv_transfer import TAKEN
from rlhf_workers.worker_role import KvReceiver, Outbox

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 30.0
"""Seconds allowed between two messages of a source."""
COMPUTE_SECONDS: Final = 10.0
"""Seconds in which the compute thread must begin the work that it is given."""
MEMORY_SHARE: Final = 8
"""Divisor of the memory; arriving caches may take the result."""
CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
"""File with the container's limit in bytes, or "max"."""

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
Receive = Callable[[Callable[[KvReceiver, Outbox], T]], "Future[T]"]


def most_arriving_bytes() -> int:
    """Return the bytes for arriving caches: a share of the machine's memory or, if smaller, of the container's
    limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        limit = "max"
    return min(machine, int(limit) if limit.isdigit() else machine) // MEMORY_SHARE


class KvSinkService(KvSinkServicer):
    """Serves one worker's generation role."""

    def __init__(self, receive: "Receive[Any]", most_bytes: int, *, pinned: bool = False) -> None:
        """`receive` runs work on the compute thread (`Compute.receive`); `pinned`: caches are joined in pinned
        memory, if possible."""
        self._pinned = pinned
        self._receive = receive
        self._most_bytes = most_bytes
        self._bytes = 0
        self._closed = "this worker has no session with its coordinator yet"
        self._running: set[asyncio.Future[pb.KvReceipt]] = set()

    def open(self) -> None:
        """Accept samples from now on."""
        self._closed = ""

    def close(self, why: str) -> None:
        """Refuse new samples and end running calls."""
        self._closed = why
        for running in self._running:
            running.cancel()

    async def Receive(  # noqa: N802 (gRPC's name)
        self, request_iterator: AsyncIterator[pb.KvPart], context: Context
    ) -> pb.KvReceipt:
        """See the service's definition."""
        if self._closed:
            return pb.KvReceipt(why=self._closed)
        running = asyncio.ensure_future(self._receive_cache(aiter(request_iterator), context))
        self._running.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            if self._closed and not context.cancelled():
                return pb.KvReceipt(why=self._closed)
            raise
        except (KvRefusedError, WorkError) as error:
            return pb.KvReceipt(why=str(error))
        except TimeoutError as error:
            return pb.KvReceipt(why=str(error))
        except Exception as error:
            log.error("a sample could not be taken: %s", describe(error), exc_info=error)
            return pb.KvReceipt(why=f"on the destination: {describe(error)}")
        finally:
            self._running.discard(running)

    async def _receive_cache(self, parts: AsyncIterator[pb.KvPart], context: Context) -> pb.KvReceipt:
        offer = (await self._part(parts, "offer")).offer
        room = await self._on_compute(lambda receiver, _: receiver.offer(offer), self._drop_late)
        arrival: IncomingCache | None = None
        admitted = False
        try:
            arrival = IncomingCache(room.shapes, room.expected, room.longest, self._allow, pinned=self._pinned)
            await context.send_initial_metadata(((TAKEN, "yes"),))
            part = await self._part(parts, "chunk", "hand_over")
            while part.HasField("chunk"):
                arrival.take(part.chunk)
                part = await self._part(parts, "chunk", "hand_over")
            hand_over, size = part.hand_over, arrival.received
            cache = arrival.whole(hand_over.positions)
            # Not undone if the call is cancelled: the report of an admitted sample may have moved its lease here.
            await self._on_compute(
                lambda receiver, outbox: receiver.admit(room.key, hand_over, cache, outbox, size), lambda _: None
            )
            admitted = True
            return pb.KvReceipt(accepted=True)
        finally:
            if arrival is not None:
                arrival.close()
            if not admitted:
                self._drop(room.key)

    @staticmethod
    async def _part(parts: AsyncIterator[pb.KvPart], *kinds: str) -> pb.KvPart:
        """Return the next message, which must be of one of these kinds."""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                part = await anext(parts)
        except TimeoutError:
            raise TimeoutError(f"no message of the source within {IDLE_SECONDS:g} s") from None
        except StopAsyncIteration:
            raise KvRefusedError("the source ended the call before the hand-over") from None
        if part.WhichOneof("part") not in kinds:
            raise KvRefusedError(f"a message of kind {part.WhichOneof('part')} came where {' or '.join(kinds)} was due")
        return part

    async def _on_compute(self, work: Callable[[KvReceiver, Outbox], T], late: Callable[[T], None]) -> T:
        """Run `work` on the compute thread and return its result. Raises TimeoutError if it does not start in time."""
        answer: Future[T] = self._receive(work)
        waiting = asyncio.wrap_future(answer)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=COMPUTE_SECONDS)
            if not done and answer.cancel():
                raise TimeoutError(f"the destination's compute thread was busy for {COMPUTE_SECONDS:g} s")
            return await waiting
        except asyncio.CancelledError:
            if not answer.cancel():
                answer.add_done_callback(lambda done: None if done.exception() else late(done.result()))
            raise

    def _drop_late(self, room: Any) -> None:
        self._drop(room.key)

    def _drop(self, key: SampleKey) -> None:
        self._receive(lambda receiver, _: receiver.drop(key))

    def _allow(self, more: int) -> bool:
        if self._bytes + more > self._most_bytes:
            return False
        self._bytes += more
        return True
