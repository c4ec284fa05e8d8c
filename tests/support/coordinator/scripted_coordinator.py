"""A coordinator that a test controls: a real gRPC server whose sessions are queues.

Rule: makes no decisions. A test accepts each new session, reads the worker's messages and sends its own.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from tests.support.coordinator.partial_services import PartialCoordinator
from tests.support.loopback import free_port

from rlhf_api.protocol import PROTOCOL
from rlhf_common import control_pb2 as pb
from rlhf_common.channels import OPTIONS, server_credentials
from rlhf_common.control_pb2_grpc import add_CoordinatorServicer_to_server
from rlhf_common.names import Env

PATIENCE = 400.0
"""Seconds until a test gives up waiting for a message; loading torch takes several on a busy machine."""


class ScriptedSession:
    """One worker's session; `received` has all messages but Register, in order."""

    def __init__(self, register: pb.Register, outgoing: "asyncio.Queue[pb.CoordinatorMessage | None]") -> None:
        self.register = register
        self.received: list[pb.WorkerMessage] = []
        self._outgoing = outgoing
        self._arrived = asyncio.Event()

    def welcome(self, job: str, epoch: int = 1, protocol: int = PROTOCOL) -> None:
        welcome = pb.Welcome(coordinator_epoch=epoch, job=job, heartbeat_seconds=0.1, protocol=protocol)
        self._outgoing.put_nowait(pb.CoordinatorMessage(welcome=welcome))

    def send(self, number: int, **command: Any) -> None:
        self._outgoing.put_nowait(pb.CoordinatorMessage(command=pb.Command(id=number, **command)))

    def end(self) -> None:
        """End the call from the coordinator's side."""
        self._outgoing.put_nowait(None)

    def arrive(self, message: pb.WorkerMessage) -> None:
        self.received += message.batch.messages if message.HasField("batch") else [message]
        self._arrived.set()

    async def first(self, kind: str, wanted: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the first matching message of this kind, already received or still to come."""
        return (await self.all(kind, 1, wanted))[0]

    async def all(self, kind: str, count: int, wanted: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        async with asyncio.timeout(PATIENCE):
            while True:
                self._arrived.clear()
                messages = [getattr(message, kind) for message in self.received if message.HasField(kind)]  # type: ignore[arg-type] # any of them
                messages = [message for message in messages if wanted(message)]
                if len(messages) >= count:
                    return messages
                await self._arrived.wait()

    async def done(self, number: int) -> pb.CommandDone:
        answer: pb.CommandDone = await self.first("done", lambda done: done.command_id == number)
        return answer


class ScriptedCoordinator(PartialCoordinator):
    """Accepts sessions; `session()` returns the next one."""

    def __init__(self) -> None:
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._sessions: asyncio.Queue[ScriptedSession] = asyncio.Queue()

    async def listen(self, certificates: Path | None, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
        add_CoordinatorServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port or free_port()}"  # the address stays the same over restarts
        if certificates is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, server_credentials(certificates))
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Stop like a killed process: every call breaks at once."""
        assert self._server is not None
        await self._server.stop(None)

    async def session(self) -> ScriptedSession:
        return await asyncio.wait_for(self._sessions.get(), PATIENCE)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        messages = request_iterator
        outgoing: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue()
        register = await anext(aiter(messages))
        session = ScriptedSession(register.register, outgoing)

        async def read() -> None:
            async for message in messages:
                session.arrive(message)

        reading = asyncio.create_task(read())
        self._sessions.put_nowait(session)
        try:
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            reading.cancel()


@asynccontextmanager
async def worker_process(
    coordinator: str, group: str, log: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a real worker process `<group>-0` with its log in `log`; kill it at the end if it still runs."""
    variables: dict[str, str] = {
        Env.COORDINATOR: coordinator,
        Env.GROUP: group,
        Env.INDEX: "0",
        Env.LISTEN: "127.0.0.1:0",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_")}
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlhf_workers", env={**inherited, **variables, **environment}, stderr=stderr
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
