"""A link of limited speed between two processes of one machine, which delays the data.

Rule: bytes leave in order, at most at the given rate, and arrive a fixed time later. Data on the link is bounded like
a real link's buffers. A faster sender has to wait, so it can observe how much of its data has left.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Final

PIECE: Final = 16 * 1024
"""Bytes that leave together."""
BUFFER_SECONDS: Final = 0.002
"""Seconds of sending that the link buffers in addition to data in transit."""


class SlowLink:
    """Forwards connections to `address` to `target`: `delay` seconds each way, `rate` bytes per second."""

    def __init__(self, target: str, delay: float, rate: float) -> None:
        self.address = ""
        self._target = target
        self._delay = delay
        self._rate = rate
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, stack: AsyncExitStack) -> None:
        """Listen until `stack` is closed."""
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
        await asyncio.sleep(2 * self._delay)  # the TCP handshake
        host, _, port = self._target.rpartition(":")
        there, on = await asyncio.open_connection(host, int(port))
        for source, sink in ((incoming, on), (there, back)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        capacity = max(2, int((self._delay + BUFFER_SECONDS) * self._rate / PIECE))
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(capacity)
        arriving = asyncio.create_task(self._arrive(way, sink))
        left = 0.0
        try:
            while data := await source.read(PIECE):
                left = max(left, time.perf_counter()) + len(data) / self._rate
                await way.put((left + self._delay, data))
            await way.put((left + self._delay, b""))
            await arriving
        except OSError:
            pass  # the other end is gone, so its data in transit is lost
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
