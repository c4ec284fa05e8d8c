"""The coordinator's gRPC service: sessions, batches, status, stop; with health and reflection, and optional mutual TLS.

An invalid message ends its session, with a status that gives the reason.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rlhf_api.protocol import PROTOCOL, written_job
from rlhf_common import control_pb2 as pb
from rlhf_common import control_pb2_grpc
from rlhf_common.channels import OPTIONS, server_credentials
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sessions import WorkerStream
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.service.batches import Batches
from rlhf_coordinator.service.status import job_status
from rlhf_coordinator.state.fleet import Cause, Refused
from rlhf_coordinator.state.job_state import StopOrder

log = logging.getLogger(__name__)

REGISTER_SECONDS: Final = 10.0
"""Seconds within which a stream must register."""
WORKERS_PER_PROGRESS_STEP: Final = 16
"""Number of workers up to which progress comes every quarter second; with more, it comes proportionally less often."""
MAX_WATCH_HZ: Final = 20.0
MAX_STATUS_CHARACTERS: Final = 1000
"""Maximum characters of the texts that are cut for a gRPC status."""

_CODES: Final = {
    Cause.UNKNOWN: grpc.StatusCode.INVALID_ARGUMENT,
    Cause.TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    Cause.INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
}

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorService(control_pb2_grpc.CoordinatorServicer):
    """`rlhf.v1.Coordinator` of one job."""

    def __init__(self, run: JobRun, event_handlers: EventHandlers) -> None:
        self._run = run
        self._event_handlers = event_handlers
        self._batches = Batches(run)
        self._written_job = written_job(run.context.job)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Context
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        """Serve one worker's stream, from its registration to its end."""
        register = await self._first(context)
        number = self._run.sessions.number()
        joined = self._register(register, number)
        if isinstance(joined, Refused):
            await context.abort(_CODES[joined.cause], joined.reason[:MAX_STATUS_CHARACTERS])
        session = self._run.sessions.open(register.worker, number)
        reader = asyncio.create_task(self._read(session, context))
        try:
            yield pb.CoordinatorMessage(welcome=self._welcome())
            while (message := await session.outgoing.get()) is not None:
                yield message
            if session.problem:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, session.problem[:MAX_STATUS_CHARACTERS])
        finally:
            reader.cancel()
            self._run.sessions.close(session)
            self._event_handlers.closed(register.worker, number)

    async def FetchBatch(  # noqa: N802
        self, request: pb.FetchBatchRequest, context: Context
    ) -> AsyncIterator[pb.BatchPart]:
        """Send an iteration's batch, or one chunk of it, in parts.

        The status is FAILED_PRECONDITION if the batch is not available, DATA_LOSS if its segment is incomplete.
        """
        try:
            if request.chunk:
                parts = self._batches.chunk(request.iteration, request.chunk)
            else:
                parts = self._batches.parts(request.iteration)
        except LookupError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error.args[0])[:MAX_STATUS_CHARACTERS])
        except JobError as error:
            self._fail(error)
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        for part in parts:
            yield part

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.JobStatus:  # noqa: N802
        """Return the current status."""
        return job_status(self._run)

    async def WatchStatus(  # noqa: N802
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.JobStatus]:
        """Send a status that differs from the last one sent, at most at the requested rate; the stream ends with the
        job.

        The rate is at most MAX_WATCH_HZ, and 1 Hz by default.
        """
        rate = min(MAX_WATCH_HZ, request.max_rate_hz) if request.max_rate_hz > 0 else 1.0
        last = pb.JobStatus()
        while True:
            over = self._run.outcome is not None  # read first: the job may end while a status is being sent
            status = job_status(self._run)
            if status != last:
                yield status
                last = status
            if over:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1 / rate):
                    await self._run.over.wait()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:  # noqa: N802
        """Order the job to stop; return after it is over."""
        reason = request.reason[:MAX_STATUS_CHARACTERS] or "asked to stop"
        order_stop(self._run, checkpoint=request.checkpoint, reason=reason)
        await self._run.over.wait()
        state = self._run.state
        return pb.StopReply(iteration=state.version, checkpoint=state.checkpoint.folder)

    async def Resize(self, request: pb.ResizeRequest, context: Context) -> pb.ResizeReply:  # noqa: N802
        """Resize groups; return when the sizes are in force. INVALID_ARGUMENT when a group cannot have its size."""
        try:
            changed = self._run.state.fleet.resize(request.replicas, time.monotonic())
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MAX_STATUS_CHARACTERS])
        if changed:
            sizes = ", ".join(f"{name} {count}" for name, count in sorted(request.replicas.items()))
            log.info("the groups are resized: %s", sizes)
            self._run.event("resize", sizes)
            self._run.wake()
        return pb.ResizeReply()

    async def _first(self, context: Context) -> pb.Register:
        message = None
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(REGISTER_SECONDS):
                message = await _next(context)
        if not isinstance(message, pb.WorkerMessage) or message.WhichOneof("message") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be Register")
        return message.register

    def _register(self, register: pb.Register, number: int) -> Refused | None:
        if self._run.outcome is not None:
            return Refused(f"the job is {self._run.outcome.phase}")
        try:
            joined = self._event_handlers.register(register, number)
        except ValueError as error:
            return Refused(f"Register of {register.worker} makes no sense: {error}")
        return joined if isinstance(joined, Refused) else None

    async def _read(self, session: WorkerStream, context: Context) -> None:
        """Process messages until the worker ends the stream, sends an invalid one, or has another session."""
        workers = self._run.state.fleet.workers
        try:
            while (message := await _next(context)) is not grpc.aio.EOF:
                if workers[session.worker].session != session.number:
                    break
                self._take(session, message)
        except ValueError as error:
            session.problem = str(error)[:MAX_STATUS_CHARACTERS]
            self._run.totals.bad_messages += 1
            log.error("%s: %s; its session is ended", session.worker, session.problem)
            self._run.event("bad-message", session.problem, worker=session.worker)
            self._count_bad_message(session.worker, session.problem)
        except JobError as error:
            self._fail(error)
        finally:
            session.outgoing.put_nowait(None)

    def _take(self, session: WorkerStream, message: pb.WorkerMessage) -> None:
        """Process one message.

        Raises ValueError for an invalid message, and for an unforeseen error in processing. Raises JobError.
        """
        try:
            self._event_handlers.message(session.worker, message)
        except (ValueError, JobError):
            raise
        except Exception as error:
            log.exception("%s: a message could not be processed", session.worker)
            raise ValueError(f"a message could not be processed: {type(error).__name__}: {error}") from error

    def _count_bad_message(self, name: str, reason: str) -> None:
        worker = self._run.state.fleet.workers[name]
        worker.failures += 1
        if worker.failures > self._run.context.spec.run_policy.backoff_limit:
            self._fail(JobError("BadMessage", f"{name} keeps sending invalid messages: {reason}"))

    def _fail(self, error: JobError) -> None:
        self._run.state.failure = error.failure
        self._run.wake()

    def _welcome(self) -> pb.Welcome:
        fleet = self._run.state.fleet
        return pb.Welcome(
            coordinator_epoch=self._run.coordinator_epoch,
            job=self._written_job,
            protocol=PROTOCOL,
            trace_run=self._run.trackers.trace_run,
            heartbeat_seconds=fleet.heartbeat,
            progress_seconds=0.25 * max(1.0, len(fleet.workers) / WORKERS_PER_PROGRESS_STEP),
        )


async def _next(context: Context) -> Any:
    """Return the next message of a stream. Raises ValueError for invalid bytes."""
    try:
        return await context.read()
    except DecodeError as error:
        raise ValueError(f"bytes that are no message: {error}") from error


def order_stop(run: JobRun, *, checkpoint: bool, reason: str) -> None:
    """Order the job to stop, with a checkpoint or without."""
    log.info("stopping: %s", reason)
    run.event("stop", reason)
    run.state.stop = StopOrder(checkpoint, reason)
    run.wake()


async def start_server(service: CoordinatorService, listen: str, certificates: Path | None) -> grpc.aio.Server:
    """Return the started server. Raises JobError (exit code 24) when the address is unavailable."""
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    name = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
    reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        if certificates is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(certificates))
    except RuntimeError as error:
        message = f"the address {listen} cannot be used: {error}"
        raise JobError("AddressInUse", message, field="RLHF_LISTEN", exit_code=ExitCode.ADDRESS_IN_USE) from error
    await server.start()
    for served in ("", name):
        await checks.set(served, health_pb2.HealthCheckResponse.SERVING)
    log.info("serves at %s (port %d)%s", listen, port, "" if certificates else ", without TLS")
    return server
