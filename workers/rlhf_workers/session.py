"""One Session call: sends Register, receives Welcome, then exchanges commands, messages and heartbeats.

Rule: a session ends at the first error and gives the reason. Must never execute a command itself, nor own state that
outlives the session.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

import grpc

from rlhf_api.protocol import mismatch
from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_workers.outbox import SessionOutbox

WELCOME_SECONDS: Final = 30.0
"""Maximum seconds from Register to Welcome."""

SessionCall = grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.CoordinatorMessage]
BROKEN: Final = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


class SessionBrokenError(Exception):
    """The session ended; the text says why."""


class IncompatibleError(SessionBrokenError):
    """The coordinator's version does not work with this worker's."""


class CoordinatorSession:
    """Runs one Session call on an open channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        outbox: SessionOutbox,
        wake: asyncio.Event,
        heartbeat: Callable[[], pb.Heartbeat],
    ) -> None:
        """`wake` is set when messages of the outbox should be sent."""
        self._stub = CoordinatorStub(channel)
        self._outbox = outbox
        self._wake = wake
        self._heartbeat = heartbeat

    async def run(
        self,
        register: pb.Register,
        on_welcome: Callable[[pb.Welcome], None],
        on_command: Callable[[pb.Command], None],
        on_siblings: Callable[[pb.SiblingTokens], None],
    ) -> NoReturn:
        """Run until the call breaks; raise SessionBrokenError then, or an error of the callbacks."""
        call = self._stub.Session()
        try:
            await call.write(pb.WorkerMessage(register=register))
            welcome = await self._welcome(call)
            if problem := mismatch(register.worker, register.protocol, welcome.protocol):
                raise IncompatibleError(problem)
            on_welcome(welcome)
            tasks = [
                asyncio.create_task(self._read(call, on_command, on_siblings)),
                asyncio.create_task(self._write(call, welcome.heartbeat_seconds or 1.0)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            # The reader knows the status of the call; a writer that fails first knows only that it ended.
            raise next(outcome for outcome in outcomes if isinstance(outcome, Exception))
        except BROKEN as error:
            raise await _broken(call, error) from error
        finally:
            call.cancel()

    async def _welcome(self, call: SessionCall) -> pb.Welcome:
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                message = await call.read()
        except TimeoutError:
            raise SessionBrokenError(f"no welcome within {WELCOME_SECONDS:.0f} s of registering") from None
        if not isinstance(message, pb.CoordinatorMessage):  # the end of the stream
            raise await _broken(call, None)
        if message.WhichOneof("message") != "welcome":
            raise SessionBrokenError("the coordinator's first message was not a welcome")
        return message.welcome

    async def _read(
        self,
        call: SessionCall,
        on_command: Callable[[pb.Command], None],
        on_siblings: Callable[[pb.SiblingTokens], None],
    ) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.CoordinatorMessage):
                raise await _broken(call, None)
            match message.WhichOneof("message"):
                case "command":
                    on_command(message.command)
                case "siblings":
                    on_siblings(message.siblings)

    async def _write(self, call: SessionCall, period: float) -> None:
        now = asyncio.get_running_loop().time
        next_beat = now()
        while True:
            if now() >= next_beat:
                await call.write(pb.WorkerMessage(heartbeat=self._heartbeat()))
                next_beat = now() + period
            messages = self._outbox.unsent()
            if messages:
                batch = pb.WorkerMessage(batch=pb.Batch(messages=messages))
                await call.write(batch if len(messages) > 1 else messages[0])
                self._outbox.sent(messages)
                continue
            self._wake.clear()
            if not self._outbox.unsent():
                try:
                    async with asyncio.timeout(max(next_beat - now(), 0.0)):
                        await self._wake.wait()
                except TimeoutError:
                    continue


async def _broken(call: SessionCall, error: BaseException | None) -> SessionBrokenError:
    if not call.done():
        return SessionBrokenError(f"the call broke: {error}")
    code = await call.code()
    details = await call.details()
    if code == grpc.StatusCode.OK:
        return SessionBrokenError("the coordinator ended the call")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return IncompatibleError(details)
    return SessionBrokenError(f"{code.name.lower().replace('_', ' ')}: {details}")
