"""Reads coordinators, and sends them sizes, over mutual TLS in the background, so that a slow one delays no
reconcile.
"""

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import grpc

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import OPTIONS, SERVER_NAME
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import COORDINATOR_PORT, PHASES, Group
from rlhf_operator.certificates import Certificates
from rlhf_operator.reconcile.job_status import TEXT_MAX
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.termination_log import ITERATION_MAX, PATH_MAX, metrics
from rlhf_operator.untrusted import clean

log = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 3.0
"""Time-out of a call in seconds."""
READ_EVERY_SECONDS: Final = 9.0
"""Longest pause in seconds between readings while a coordinator answers."""
LONGEST_PAUSE_SECONDS: Final = 72.0
"""Longest pause in seconds between attempts at a silent coordinator."""
AT_ONCE: Final = 64
"""Most readings in flight."""
DOUBT_MAX: Final = 300
"""Maximum characters stored of the sentence about the journal's lock."""
ENGINE_MAX: Final = 300
"""Maximum characters stored of a worker's description of its engine."""
SILENT_MAX_SECONDS: Final = 1e8
"""Longest accepted silence of a worker in seconds: three years."""
REPLY_BYTES: Final = 4 * 1024 * 1024
"""Largest reply in bytes."""
WORKING: Final = frozenset({"Ready", "Busy"})
LOST: Final = "Lost"
AWAY: Final = frozenset({"Missing", LOST})
"""States of workers without a session."""
UNKNOWN: Final = "Unknown"
"""Stands for a phase that this operator does not know."""
LONGEST_SECONDS: Final = 10 * 365 * 24 * 3600.0
"""Longest accepted estimate in seconds: ten years."""
WAITS_KEPT: Final = 16
"""Maximum number of stored sentences per list: what the job waits for, failed samples, lost trackers, warnings."""
SUMMARY_MAX: Final = 300
"""Most characters stored of each sentence."""
PLAN_MAX: Final = 8192
"""Most characters of a plan for spec.devices; a longer one is dropped."""
POOL_MAX: Final = 5000
"""Workers of a migration pool that are read; a valid job has at most 4,096 generation workers."""
_RECEIVED: Final = "grpc.max_receive_message_length"
_GROUPS: Final = frozenset(group.value for group in Group)
_WORKER: Final = re.compile(r"[a-z]{1,32}-[0-9]{1,9}")


@dataclass
class _Connection:
    address: str
    certificates: Certificates
    run_id: str = ""
    """`ObservedPod.run_id` of the coordinator at this address."""
    channel: grpc.aio.Channel | None = None
    """Connection; None before the first attempt and after a failed one."""
    before: CoordinatorReading | None = None
    """Last reading through an earlier connection; its `run_id` may be that of a coordinator that is gone."""
    reading: CoordinatorReading | None = None
    problem: str = ""
    failures: int = 0
    """Failed attempts since the last answer, or since `run_id` or `sign` changed."""
    sign: object = None
    sizes: pb.ResizeRequest | None = None
    """Sizes that the coordinator has not yet accepted."""
    woken: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when the next attempt should start at once."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Coordinators:
    """The latest reading for each job key; each coordinator is read regularly until `forget`.

    `on_change(key)` is called for news.
    """

    def __init__(self, on_change: Callable[[str], None], port: int = COORDINATOR_PORT) -> None:
        self._on_change = on_change
        self._port = port
        self._connections: dict[str, _Connection] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._closing: set[asyncio.Task[None]] = set()

    def latest(self, key: str) -> tuple[CoordinatorReading | None, str]:
        """Return (last reading, reason why there is no newer one)."""
        connection = self._connections.get(key)
        return (None, "") if connection is None else (connection.reading or connection.before, connection.problem)

    def refresh(
        self, key: str, address: str, certificates: Certificates, run_id: str = "", sign: object = None
    ) -> None:
        """Read the coordinator at this address from now on, and less often while it does not answer.

        When `run_id` (`ObservedPod.run_id`) or `sign` changes, the pause before the next attempt ends.
        """
        connection = self._connections.get(key)
        if connection is None or connection.address != address or connection.certificates != certificates:
            before = self.latest(key)[0]
            self.forget(key)
            connection = _Connection(address, certificates, run_id, before=before, sign=sign)
            self._connections[key] = connection
            connection.task = asyncio.create_task(self._read_on(key, connection))
        elif (connection.run_id, connection.sign) != (run_id, sign):
            connection.run_id, connection.sign, connection.failures = run_id, sign, 0
            connection.woken.set()

    def resize(self, key: str, replicas: Mapping[str, int]) -> None:
        """Send the sizes of the groups with the next reading, without a pause before it.

        Do nothing if the coordinator is not read, or if these sizes are already to be sent.
        """
        connection, sizes = self._connections.get(key), pb.ResizeRequest(replicas=replicas)
        if connection is not None and connection.sizes != sizes:
            connection.sizes = sizes
            connection.woken.set()

    def forget(self, key: str) -> None:
        """Stop reading a job."""
        connection = self._connections.pop(key, None)
        if connection is not None:
            if connection.task is not None:
                connection.task.cancel()
            self._disconnect(connection)

    async def close(self) -> None:
        """Stop reading all jobs, and wait until the channels are closed."""
        for key in list(self._connections):
            self.forget(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _disconnect(self, connection: _Connection) -> None:
        channel, connection.channel = connection.channel, None
        if channel is not None:
            closing = asyncio.create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _read_on(self, key: str, connection: _Connection) -> None:
        while True:
            if await self._read(key, connection):
                self._on_change(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause(connection.failures)):
                    await connection.woken.wait()
            connection.woken.clear()

    async def _read(self, key: str, connection: _Connection) -> bool:
        """Send sizes that are due, and read once; return whether there is news."""
        before, problem, run_id = connection.reading, connection.problem, connection.run_id
        try:
            async with self._slots:
                connection.channel = connection.channel or self._channel(connection.address, connection.certificates)
                stub: Any = CoordinatorStub(connection.channel)
                if (sizes := connection.sizes) is not None:
                    await stub.Resize(sizes, timeout=TIMEOUT_SECONDS)
                    # The caller may have changed the sizes meanwhile.
                    connection.sizes = None if connection.sizes is sizes else connection.sizes
                answer = await stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_SECONDS)
            connection.reading = reading_of(answer, datetime.now(UTC), run_id)
        except grpc.aio.AioRpcError as error:
            connection.problem = f"its status could not be read ({error.code().name.lower().replace('_', ' ')})"
        except Exception:
            log.exception("%s: the answer of its coordinator cannot be processed", key, extra={"job": key})
            connection.problem = "its status could not be read (an error of the operator)"
        else:
            connection.problem, connection.failures = "", 0
            return bool(problem) or sizes is not None or before is None or before.says_else(connection.reading)
        connection.failures += 1
        self._disconnect(connection)
        return connection.problem != problem

    def _channel(self, address: str, certificates: Certificates) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.certificate)
        options = [option for option in OPTIONS if option[0] != _RECEIVED]
        options += [(_RECEIVED, REPLY_BYTES), ("grpc.ssl_target_name_override", SERVER_NAME)]
        host = f"[{address}]" if ":" in address else address
        return grpc.aio.secure_channel(f"{host}:{self._port}", credentials, options=options)


def pause(failures: int) -> float:
    """Return the seconds between two attempts after a number of consecutive failures."""
    return min(READ_EVERY_SECONDS * 2.0 ** min(failures, 16), LONGEST_PAUSE_SECONDS)


def reading_of(status: pb.JobStatus, now: datetime, run_id: str = "") -> CoordinatorReading:
    """Return the part of a JobStatus that reconcile reads, within bounds."""
    working = Counter(worker.worker.rpartition("-")[0] for worker in status.workers if worker.state in WORKING)
    return CoordinatorReading(
        at=now,
        run_id=run_id,
        phase=status.phase if status.phase in PHASES or not status.phase else UNKNOWN,
        iteration=_count(status.iteration),
        iterations=_count(status.iterations),
        working={group: count for group, count in working.items() if group in _GROUPS},
        replicas={group: _count(count) for group, count in status.replicas.items() if group in _GROUPS},
        metrics=metrics(status.metrics),
        seconds_left=_seconds(status.seconds_left, LONGEST_SECONDS),
        last_checkpoint=clean(status.last_checkpoint) if len(status.last_checkpoint) <= PATH_MAX else "",
        waiting_for=tuple(clean(summary[:SUMMARY_MAX]) for summary in status.waiting_for[:WAITS_KEPT]),
        sample_failures=tuple(clean(text[:SUMMARY_MAX]) for text in status.sample_failures[:WAITS_KEPT]),
        lost_trackers=tuple(clean(text[:SUMMARY_MAX]) for text in status.lost_trackers[:WAITS_KEPT]),
        warnings=tuple(clean(text[:SUMMARY_MAX]) for text in status.warnings[:WAITS_KEPT]),
        pool=tuple(dict.fromkeys(worker for worker in status.pool[:POOL_MAX] if _WORKER.fullmatch(worker))),
        threshold=_count(status.fusion.threshold),
        released=len(status.fusion.released),
        streams=sum(worker.state not in AWAY for worker in status.workers),
        fusion=clean(status.fusion.choice[:TEXT_MAX]),
        long_rounds=clean(status.long_rounds[:TEXT_MAX]),
        speculation=clean(status.speculation.summary[:TEXT_MAX]),
        speculation_switched=clean("".join(status.speculation.switches[:1])[:TEXT_MAX]),
        engines=Counter(clean(worker.engine[:ENGINE_MAX]) for worker in status.workers if worker.engine),
        predicted_seconds=_seconds(status.fusion.predicted_seconds, LONGEST_SECONDS),
        plan_drift=clean(status.plan_drift[:TEXT_MAX]),
        device_plan=clean(status.device_plan) if len(status.device_plan) <= PLAN_MAX else "",
        lock_shared=status.journal_lock_shared,
        lock_doubt=clean(status.journal_lock_doubt[:DOUBT_MAX]),
        silent={
            worker.worker: now - timedelta(seconds=worker.silent_seconds)
            for worker in status.workers
            if worker.state == LOST
            and 0 < worker.silent_seconds < SILENT_MAX_SECONDS
            and _WORKER.fullmatch(worker.worker)
        },
    )


def _count(value: int) -> int:
    return min(max(value, 0), ITERATION_MAX)


def _seconds(value: float, most: float) -> float:
    """Return the value, or 0 if it is outside the bounds or NaN."""
    return value if 0 <= value <= most else 0.0
