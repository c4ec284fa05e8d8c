"""The open sessions: one outgoing queue per worker.

Rule: sending does not block. A message to a worker without a session is dropped.
"""

import asyncio
from dataclasses import dataclass, field

from rlhf_common import control_pb2 as pb


@dataclass
class WorkerStream:
    """One stream to a worker."""

    number: int
    worker: str
    outgoing: asyncio.Queue[pb.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    """Messages to the worker; None ends the stream."""
    problem: str = ""
    """Error in a message of the worker; empty without one."""


class Sessions:
    """Sessions by worker name; `number` counts up from 1."""

    def __init__(self) -> None:
        self._open: dict[str, WorkerStream] = {}
        self._count = 0
        self._closed = asyncio.Event()

    def number(self) -> int:
        """Return a new session number."""
        self._count += 1
        return self._count

    def open(self, worker: str, number: int) -> WorkerStream:
        """Open a session of the worker, end an older one, and return the new one."""
        self.end(worker)
        self._open[worker] = session = WorkerStream(number, worker)
        return session

    def close(self, session: WorkerStream) -> None:
        """Record that a stream is over."""
        if self._open.get(session.worker) is session:
            del self._open[session.worker]
        self._closed.set()

    def end(self, worker: str) -> None:
        """End a worker's stream from the coordinator's side."""
        session = self._open.pop(worker, None)
        if session is not None:
            session.outgoing.put_nowait(None)

    def send(self, worker: str, message: pb.CoordinatorMessage) -> None:
        """Queue a message; without a session it is dropped."""
        session = self._open.get(worker)
        if session is not None:
            session.outgoing.put_nowait(message)

    async def until_empty(self) -> None:
        """Wait until no session is open."""
        while self._open:
            self._closed.clear()
            await self._closed.wait()
