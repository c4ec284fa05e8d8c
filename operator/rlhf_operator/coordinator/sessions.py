"""The open sessions: one outgoing queue a worker.

Rule: sending never blocks and never fails; a message to a worker that is gone is dropped, because the worker says in
its next Register what it is, and the coordinator decides anew.
"""

import asyncio
from dataclasses import dataclass, field

from rlhf_api import control_pb2 as pb


@dataclass
class Session:
    """One stream to a worker."""

    number: int
    worker: str
    outgoing: asyncio.Queue[pb.CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""


class Sessions:
    """Sessions by worker name; numbers count up from 1 and are never used twice."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._count = 0

    def number(self) -> int:
        """A new session number."""
        self._count += 1
        return self._count

    def open(self, worker: str, number: int) -> Session:
        """Makes this the worker's session; an older one is ended."""
        self.end(worker)
        self._open[worker] = session = Session(number, worker)
        return session

    def close(self, session: Session) -> None:
        """The stream is over."""
        if self._open.get(session.worker) is session:
            del self._open[session.worker]

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

    def __len__(self) -> int:
        return len(self._open)
