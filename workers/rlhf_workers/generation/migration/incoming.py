"""Takes samples that arrive with their KV caches: the destination's side, on the compute thread.

Rule: an offer is accepted only if the cache can be read here (same layout, same weight version) and the engine reserves
a slot. A sample that was withdrawn or accepted here with the same or a higher attempt is refused, until
`begin_iteration` drops this fence. The report of an admitted sample is in the outbox before the source gets its
receipt.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine import Engine, EngineError, Sleeps, kv_moves_of
from rlhf_workers.generation.migration.kv_chunks import KvRefusedError
from rlhf_workers.models.kv_slices import KvReservation, KvSlice
from rlhf_workers.sample_codec import key_of, progress_message, request_of, resumed_request
from rlhf_workers.worker_role import Outbox


@dataclass(frozen=True)
class _Offered:
    request: SampleRequest
    version: int
    start_ns: int


class IncomingMigrations:
    """Implements `worker_role.KvReceiver`."""

    def __init__(self, engine: Engine, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._engine = engine
        self._clock_ns = clock_ns
        self._offered: dict[SampleKey, _Offered] = {}
        self._fenced: dict[tuple[int, int], int] = {}  # (iteration, sample) -> highest attempt fenced

    def offer(self, offer: pb.KvOffer) -> KvReservation:
        """Reserve a slot for the sample; KvRefusedError if it cannot be taken."""
        moves = kv_moves_of(self._engine)
        if moves is None:
            raise KvRefusedError("this worker's engine takes no KV caches")
        if offer.layout != moves.layout:
            raise KvRefusedError(f"its cache has layout {offer.layout}, this worker's has {moves.layout}")
        self._check_version(offer.version)
        try:
            request = request_of(offer.sample)
        except ValueError as error:
            raise KvRefusedError(f"the offer is malformed: {error}") from error
        self._check_attempt(request.key)
        if isinstance(self._engine, Sleeps):
            self._engine.wake()
        if not moves.reserve():
            in_flight = self._engine.in_flight
            raise KvRefusedError(
                f"no slot, or no room for a cache, is free: {in_flight} samples are held, others may be coming"
            )
        self._offered[request.key] = _Offered(request, offer.version, self._clock_ns())
        self._fenced[request.key[:2]] = request.key.attempt
        longest = len(request.prompt) + request.max_response_tokens
        return KvReservation(request.key, moves.shapes, len(request.prompt) + len(request.tokens), longest)

    def admit(self, key: SampleKey, hand_over: pb.KvHandOver, cache: KvSlice | None, outbox: Outbox, size: int) -> None:
        """Take the sample and report it; KvRefusedError if it is unwanted, malformed or refused by the engine."""
        offered, moves = self._offered.get(key), kv_moves_of(self._engine)
        if offered is None or moves is None:
            raise KvRefusedError("it was withdrawn, or this worker's session broke")
        self._check_version(offered.version)
        if key_of(hand_over.sample.key) != key or hand_over.sample.offset:
            raise KvRefusedError("the hand-over is of another sample than the offer")
        try:
            request = resumed_request(offered.request, hand_over.sample)
        except ValueError as error:
            raise KvRefusedError(f"the hand-over is malformed: {error}") from error
        del self._offered[key]  # the engine releases the slot when it refuses
        try:
            moves.admit(request, cache)
        except EngineError as error:
            raise KvRefusedError(str(error)) from error
        outbox.progress(progress_message(request))
        outbox.span(
            "migrate",
            offered.start_ns,
            self._clock_ns(),
            key.iteration,
            direction="in",
            sample=str(key.sample),
            bytes=str(size),
        )

    def drop(self, key: SampleKey) -> None:
        """Release the slot of an arrival that ended before it was admitted, if it has one."""
        moves = kv_moves_of(self._engine)
        if self._offered.pop(key, None) is not None and moves is not None:
            moves.release()

    def fence(self, keys: Iterable[SampleKey]) -> None:
        """Fence samples that were withdrawn, including those still arriving."""
        for key in keys:
            self._fenced[key[:2]] = max(self._fenced.get(key[:2], 0), key.attempt)
            self.drop(key)

    def begin_iteration(self, iteration: int) -> None:
        """Drop the fences of iterations before `iteration` - 1."""
        self._fenced = {key: attempt for key, attempt in self._fenced.items() if key[0] >= iteration - 1}

    def clear(self) -> None:
        """End every arrival."""
        for key in list(self._offered):
            self.drop(key)

    def _check_version(self, version: int) -> None:
        if version != self._engine.version:
            raise KvRefusedError(f"its cache is of weight version {version}, this worker holds {self._engine.version}")

    def _check_attempt(self, key: SampleKey) -> None:
        fenced = self._fenced.get(key[:2], -1)
        if key.attempt <= fenced:
            raise KvRefusedError(f"attempt {key.attempt} has ended on this worker; its current attempt is {fenced}")
