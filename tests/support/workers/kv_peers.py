"""Peers of a migration that a test controls.

A destination records and fails as told, a source repeats the recording, and a link breaks after a number of bytes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import OPTIONS, aio_channel, server_credentials
from rlhf_common.control_pb2_grpc import KvSinkServicer, KvSinkStub, add_KvSinkServicer_to_server

TAKEN = (("rlhf-offer-taken", "yes"),)


class PlayedSink(KvSinkServicer):
    """Accepts every offer and records the messages; at phase `fault` (offer, chunk, hand-over) it fails as in `how`.

    `how` is refuse (a receipt), break (the call fails), or hang (until `go_on` is set).
    """

    def __init__(self, fault: str = "", how: str = "refuse") -> None:
        self.fault, self.how = fault, how
        self.parts: list[pb.KvPart] = []
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()

    async def Receive(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.KvPart], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.KvReceipt:
        try:
            async for part in request_iterator:
                self.parts.append(part)
                phase = str(part.WhichOneof("part")).replace("_", "-")
                if phase == self.fault:
                    self.reached.set()
                    if self.how == "refuse":
                        return pb.KvReceipt(why="told to refuse")
                    if self.how == "break":
                        await context.abort(grpc.StatusCode.INTERNAL, "told to break")
                    await self.go_on.wait()
                if phase == "offer":
                    await context.send_initial_metadata(TAKEN)
            return pb.KvReceipt(accepted=True)
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(sink: PlayedSink, certificates: Path) -> AsyncIterator[str]:
    """Serve the sink; yield its address."""
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
    add_KvSinkServicer_to_server(sink, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(certificates))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def replay(address: str, certificates: Path, parts: Iterable[pb.KvPart]) -> pb.KvReceipt:
    """Send these messages as a source would; return the receipt."""

    async def messages() -> AsyncIterator[pb.KvPart]:
        for part in parts:
            yield part

    async with aio_channel(address, certificates) as channel:
        return await KvSinkStub(channel).Receive(messages(), timeout=60)


class Link:
    """A TCP link to `target` that stalls, and then breaks, after `limit` bytes were sent towards it."""

    def __init__(self, target: str, limit: int, *, breaks: bool = True) -> None:
        self._target, self._limit, self._breaks = target, limit, breaks
        self._writers: list[asyncio.StreamWriter] = []
        self.reached = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        """Break every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, to_writer]
        back = asyncio.create_task(self._pump(to_reader, writer))
        carried = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                carried += len(data)
                if carried > self._limit:
                    self.reached.set()
                    if self._breaks:
                        self.cut()
                    break
                to_writer.write(data)
                await to_writer.drain()
        if self._breaks:
            back.cancel()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
