"""The worker's agent: dials the coordinator and connects its session with the compute thread.

The asyncio loop (main thread) owns the session, the compute thread owns the roles. The agent obeys Exit even if the
compute thread is busy. When a session breaks, the agent dials again; a running command continues.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
import uuid
from concurrent.futures import Future
from typing import Any, Final, NoReturn

from rlhf_api.job import RLHFJob
from rlhf_api.protocol import PROTOCOL, read_job
from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.endpoint import Application, Endpoint
from rlhf_common.metrics.exposition import disabled, settled
from rlhf_common.names import Env, ExitCode, Group
from rlhf_common.worker_roles import write_roles
from rlhf_workers.compute import Compute
from rlhf_workers.decode_watchdog import LOOK_SECONDS, hung_step
from rlhf_workers.devices.device import device_memory, device_name, open_device, used_memory
from rlhf_workers.devices.reproducible_sums import ask_for_reproducible_sums
from rlhf_workers.generation.engine_totals import engine_in_words
from rlhf_workers.generation.migration.kv_sink import KvSinkService, most_arriving_bytes
from rlhf_workers.logs import WorkerLogFields, flush_logs
from rlhf_workers.metrics import MeasuredWorker, metrics_of
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.peer_server import PeerServer, free_port, start_server
from rlhf_workers.progress import present_stage
from rlhf_workers.session import CoordinatorSession, IncompatibleError, SessionBrokenError
from rlhf_workers.settings import WorkerSettings, join_address, split_address
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.training.communication.collective_waits import present_wait
from rlhf_workers.training.schedule.progress_counter import finished_units
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.source import WeightSourceService
from rlhf_workers.worker_role import KeepsWeights

log = logging.getLogger(__name__)

BACKOFF_SECONDS: Final = (0.1, 1.0)
"""Shortest and longest pause in seconds between two dials, if the versions match."""
REPEAT_LOG_SECONDS: Final = 10.0
"""Minimum seconds between two log lines of the same wait for a coordinator of the right version."""
INCOMPATIBLE_SECONDS: Final = 10.0
"""Pause in seconds between two dials when the versions do not match."""
GIVE_BACK_SECONDS: Final = 1.0
"""Maximum seconds that the next dial waits for the samples of a reset."""
CLOSE_SECONDS: Final = 10.0
"""Maximum seconds to wait at shutdown until the compute thread has closed its roles."""
RESERVE_SECONDS: Final = 20.0
"""Seconds of its grace period that a training rank keeps for shutdown."""
LEAVING_SECONDS: Final = 0.2
"""Seconds for the leaving heartbeat to be sent."""
LONG_SECONDS: Final = 10.0
"""Seconds after which running work is logged with its stack when Exit arrives."""
ALARM_SECONDS: Final = 1.0
"""Seconds for the last report of a failed worker to be sent."""


class Agent:
    """One worker process."""

    def __init__(self, settings: WorkerSettings, loop: asyncio.AbstractEventLoop, endpoint: Endpoint | None) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._loop = loop
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._parted = asyncio.Event()
        self._parted.set()
        self._leaving = False
        self._fatal: Future[pb.Failure] = Future()
        self._outbox = SessionOutbox(settings.worker, self._wake_up)
        self._device = open_device(settings.device, settings.device_sharers)
        self._compute = Compute(self._device, self._outbox, settings.certificates, self._end_for)
        self._kv_sink = KvSinkService(self._compute.receive, most_arriving_bytes(), pinned=self._device.type == "cuda")
        self._incarnation = uuid.uuid4().hex
        self._rendezvous = ""
        self._advertise = ""
        self._job: RLHFJob | None = None
        self._log_fields = WorkerLogFields()
        self._held = _nothing_held()

    async def run(self) -> ExitCode:
        """Serve until SIGTERM or SIGINT (OK) or until no coordinator welcomes the worker in time (FAILED).

        Exit commands and fatal failures end the process.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        server = await start_server(
            self._settings.listen,
            self._settings.certificates,
            WeightSourceService(lambda: self._compute.weight_provider, WeightCopies(lent_by(self._device))),
            self._kv_sink,
        )
        if self._endpoint is not None:
            self._endpoint.metrics = self._metrics()
            self._beating = asyncio.create_task(self._endpoint.keep_beating())
        self._set_addresses(server)
        dialing = asyncio.create_task(self._dial())
        stopping = asyncio.create_task(self._until_free())
        watching = asyncio.create_task(self._watch_steps())
        failing = asyncio.wrap_future(self._fatal)
        ends: list[asyncio.Future[Any]] = [dialing, stopping, failing]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await self._last_words(server, failing.result())
            if dialing.done():
                return dialing.result()
        finally:
            dialing.cancel()
            watching.cancel()
            await asyncio.gather(dialing, watching, return_exceptions=True)
            await server.stop()
        log.info("asked to stop; closing")
        if not await asyncio.to_thread(self._compute.close, CLOSE_SECONDS):
            log.warning("the compute thread was still busy after %.0f s; ending without it", CLOSE_SECONDS)
        return ExitCode.OK

    def _metrics(self) -> Application:
        settings = self._settings
        return metrics_of(
            MeasuredWorker(
                settings.worker,
                settings.group,
                self._outbox,
                self._compute,
                self._device,
                lambda: not self._parted.is_set(),
                settings.certificates,
            )
        )

    async def _until_free(self) -> None:
        """Wait for SIGTERM or SIGINT. A training rank then also waits for its session to end, until its grace nearly
        ends, because the coordinator may need the ranks for a checkpoint.
        """
        await self._stop.wait()
        self._leaving = True
        if not self._parted.is_set():
            self._outbox.heartbeat(self._heartbeat())
            await asyncio.sleep(LEAVING_SECONDS)
        patience = self._settings.grace - RESERVE_SECONDS
        if Group.TRAINING in self._compute.snapshot.roles and patience > 0:
            log.info("asked to stop; this rank stays for %.0f s at most, until its coordinator releases it", patience)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._parted.wait()

    async def _watch_steps(self) -> None:
        """Watch for a decode step that hangs, and end the worker then."""
        while not self._fatal.done():
            await asyncio.sleep(LOOK_SECONDS)
            limit = self._job.spec.run_policy.hang_timeout_seconds if self._job is not None else 0
            failure = hung_step(self._compute.stepping, limit, time.monotonic(), self._compute.stack)
            if failure is not None:
                log.error("a decode step hangs at:\n%s", "".join(self._compute.stack()))
                self._end_for(failure)

    def _end_for(self, failure: pb.Failure) -> None:
        """End the worker for this failure; later failures are ignored. Called from any thread."""
        if not self._fatal.done():
            self._fatal.set_result(failure)

    def _wake_up(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _set_addresses(self, server: PeerServer) -> None:
        settings = self._settings
        host, port = split_address(Env.ADVERTISE, settings.advertise or settings.listen)
        self._advertise = join_address(host, port or server.port)
        if settings.rendezvous or settings.group == Group.TRAINING:
            rendezvous_port = settings.rendezvous_port or free_port(settings.rendezvous_host)
            self._rendezvous = join_address(settings.rendezvous_host, rendezvous_port)
        log.info("serves peers at %s; dials the coordinator at %s", self._advertise, settings.coordinator)

    # ------------------------------------------------------------ sessions

    async def _dial(self) -> ExitCode:
        address, limit = self._settings.coordinator, self._settings.start_timeout
        since = time.monotonic()
        pause, said = BACKOFF_SECONDS[0], -REPEAT_LOG_SECONDS
        while True:
            try:
                welcomed, reason = await self._one_session()
            except IncompatibleError as error:
                log.error("waiting for a coordinator at %s of another version: %s", address, error)
                await asyncio.sleep(INCOMPATIBLE_SECONDS)
                since = time.monotonic()
                continue
            if welcomed:
                since, pause, said = time.monotonic(), BACKOFF_SECONDS[0], -REPEAT_LOG_SECONDS
            waited = time.monotonic() - since
            if waited - said >= REPEAT_LOG_SECONDS:
                log.info("waiting for the coordinator at %s for %.0f s (%s)", address, waited, reason)
                said = waited
            if self._job is None and limit is not None and waited >= limit:
                log.error("gave up: no welcome from a coordinator at %s within %.0f s: %s", address, limit, reason)
                return ExitCode.FAILED
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def _one_session(self) -> tuple[bool, str]:
        """Run one session; return whether the coordinator welcomed this worker, and why the session ended.

        Raises IncompatibleError.
        """
        welcomed = False

        def on_welcome(welcome: pb.Welcome) -> None:
            nonlocal welcomed
            welcomed = True
            self._held = _nothing_held()
            self._begin_job(welcome)
            self._parted.clear()

        async with aio_channel(self._settings.coordinator, self._settings.certificates) as channel:
            try:
                session = CoordinatorSession(channel, self._outbox, self._wake, self._heartbeat)
                await session.run(self._register(), on_welcome, self._command, self._compute.learn)
            except IncompatibleError:
                raise
            except SessionBrokenError as error:
                reason = str(error)
            finally:
                self._parted.set()
        if welcomed:
            await self._give_back()
        return welcomed, reason

    def _begin_job(self, welcome: pb.Welcome) -> None:
        log.info("welcomed by the coordinator (epoch %d)", welcome.coordinator_epoch)
        try:
            job = read_job(json.loads(welcome.job))
        except ValueError as error:
            self._exit(ExitCode.FAILED, f"the coordinator's job cannot be read: {error}")
        if self._job is None:
            self._job = job
            self._log_fields.say_job(job, welcome.trace_run)
            if self._endpoint is not None and job.spec.metrics == "Disabled":
                self._endpoint.metrics = disabled
            if job.spec.deterministic:
                ask_for_reproducible_sums()
            self._compute.start(job)
        elif job.spec != self._job.spec:
            self._exit(ExitCode.RESTART, "the job's manifest changed; this process was built for the old manifest")
        self._kv_sink.open()

    async def _give_back(self) -> None:
        self._kv_sink.close("the destination's session with the coordinator broke")
        self._outbox.fence()
        self._held = self._compute.reset()
        if self._compute.snapshot.active:
            await asyncio.wait({asyncio.wrap_future(self._held)}, timeout=GIVE_BACK_SECONDS)

    def _register(self) -> pb.Register:
        settings, snapshot = self._settings, self._compute.snapshot
        command, name = self._outbox.running()
        state = pb.WorkerState(
            versions=snapshot.versions,
            trained_version=snapshot.trained_version,
            group_epoch=snapshot.group_epoch,
            busy=command != 0,
            command_id=command,
            command=name,
            last_train=self._outbox.last_train,
        )
        write_roles(state, snapshot.roles)
        return pb.Register(
            worker=settings.worker,
            group=settings.group,
            index=settings.index,
            incarnation=self._incarnation,
            address=self._advertise,
            rendezvous=self._rendezvous,
            device=settings.device,
            device_name=device_name(self._device),
            device_memory_bytes=device_memory(self._device),
            pid=os.getpid(),
            state=state,
            held=self._held.result() if self._held.done() else [],
            protocol=PROTOCOL,
            accumulates=True,
            draws_by_request=True,
        )

    def _heartbeat(self) -> pb.Heartbeat:
        roles = settled(self._compute.roles)
        return pb.Heartbeat(
            active_samples=self._compute.snapshot.active,
            queued_samples=self._compute.queued_samples(),
            tokens=self._outbox.tokens,
            busy_seconds=self._compute.busy_seconds(),
            memory_bytes=used_memory(self._device),
            leaving=self._leaving,
            stage=present_stage(),
            learns_siblings=self._compute.snapshot.learns_siblings,
            decodes_ahead=self._compute.snapshot.decodes_ahead,
            engine=engine_in_words(roles),
            training_pieces=finished_units() if Group.TRAINING in self._compute.snapshot.roles else 0,
            waits_for=present_wait(),
            kept_version=max((role.kept_version for role in roles if isinstance(role, KeepsWeights)), default=0),
        )

    # ------------------------------------------------------------ commands and ends

    def _command(self, command: pb.Command) -> None:
        if command.WhichOneof("command") == "exit":
            if (seconds := self._compute.present_seconds()) > LONG_SECONDS:
                stack = "".join(self._compute.stack())
                log.warning("asked to end in a unit of work that has taken %.0f s, at:\n%s", seconds, stack)
            self._exit(command.exit.code, command.exit.reason or "no reason given")
        else:
            self._log_fields.say_iteration(command)
            self._compute.submit(command)

    def _exit(self, code: int, reason: str) -> NoReturn:
        level = logging.INFO if code in (ExitCode.OK, ExitCode.RESTART) else logging.ERROR
        log.log(level, "exit %d: %s", code, reason)
        flush_logs()
        os._exit(code)

    async def _last_words(self, server: PeerServer, failure: pb.Failure) -> None:
        await server.set_serving(False)
        self._outbox.alarm(failure)
        await asyncio.sleep(ALARM_SECONDS)
        self._exit(failure.exit_code or ExitCode.FAILED, f"{failure.reason}: {failure.message}")


def _nothing_held() -> "Future[list[pb.SampleProgress]]":
    future: Future[list[pb.SampleProgress]] = Future()
    future.set_result([])
    return future


def run_agent(settings: WorkerSettings, endpoint: Endpoint | None = None) -> ExitCode:
    """Run the worker until it ends; see `Agent.run`."""

    async def main() -> ExitCode:
        return await Agent(settings, asyncio.get_running_loop(), endpoint).run()

    return asyncio.run(main())
