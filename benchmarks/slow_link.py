"""A link of limited speed between two processes of one machine: what goes through it comes out later.

Rule: bytes leave in order, at most so many a second, and each a fixed time after it left. What is on the link is
bounded as a link's own buffers are: a sender that is faster has to wait, so it sees how much of what it gave is away.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Final

PIECE: Final = 16 * 1024
"""Bytes that leave together."""
BUFFER_SECONDS: Final = 0.002
"""Of sending: what the link takes beyond what is on its way."""


class SlowLink:
    """Passes what connects to `address` on to `target`: `delay` seconds each way, `rate` bytes a second."""

    def __init__(self, target: str, delay: float, rate: float) -> None:
        self.address = ""
        self._target = target
        self._delay = delay
        self._rate = rate
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, stack: AsyncExitStack) -> None:
        """Until `stack` is closed."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        stack.push_async_callback(self._stop)

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, incoming: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._delay)  # the handshake of TCP
        host, _, port = self._target.rpartition(":")
        there, on = await asyncio.open_connection(host, int(port))
        for source, sink in ((incoming, on), (there, back)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        held = max(2, int((self._delay + BUFFER_SECONDS) * self._rate / PIECE))
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(held)
        arriving = asyncio.create_task(self._arrive(way, sink))
        left = 0.0
        try:
            while data := await source.read(PIECE):
                left = max(left, time.perf_counter()) + len(data) / self._rate
                await way.put((left + self._delay, data))
            await way.put((left + self._delay, b""))
            await arriving
        except OSError:
            pass  # the other end is gone: so is what was on its way
        finally:
            arriving.cancel()
            sink.close()

    async def _arrive(self, way: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter) -> None:
        while True:
            due, data = await way.get()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not data:
                return
            sink.write(data)
            await sink.drain()
