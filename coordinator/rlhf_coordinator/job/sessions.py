"""The open sessions: one outgoing queue a worker.

Rule: sending never blocks and never fails; a message to a worker that is gone is dropped, because the worker says in
its next Register what it is, and the coordinator decides anew.
"""

import asyncio
from dataclasses import dataclass, field

from rlhf_api import control_pb2 as pb


@dataclass
class WorkerStream:
    """One stream to a worker."""

    number: int
    worker: str
    outgoing: asyncio.Queue[pb.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""
    problem: str = ""
    """What the worker said that made no sense; it is told as the stream ends."""


class Sessions:
    """Sessions by worker name; numbers count up from 1 and are never used twice."""

    def __init__(self) -> None:
        self._open: dict[str, WorkerStream] = {}
        self._count = 0
        self._closed = asyncio.Event()

    def number(self) -> int:
        """A new session number."""
        self._count += 1
        return self._count

    def open(self, worker: str, number: int) -> WorkerStream:
        """Makes this the worker's session; an older one is ended."""
        self.end(worker)
        self._open[worker] = session = WorkerStream(number, worker)
        return session

    def close(self, session: WorkerStream) -> None:
        """The stream is over."""
        if self._open.get(session.worker) is session:
            del self._open[session.worker]
        self._closed.set()

    def end(self, worker: str) -> None:
        """Ends a worker's stream from our side."""
        session = self._open.pop(worker, None)
        if session is not None:
            session.outgoing.put_nowait(None)

    def send(self, worker: str, message: pb.CoordinatorMessage) -> None:
        """Queues a message."""
        session = self._open.get(worker)
        if session is not None:
            session.outgoing.put_nowait(message)

    async def until_empty(self) -> None:
        """Returns when every stream is over."""
        while self._open:
            self._closed.clear()
            await self._closed.wait()
