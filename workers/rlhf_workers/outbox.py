"""Queue of the messages that roles report, until the session's writer sends them. Thread-safe.

Rule: when a session breaks, `fence` drops unsent messages, except the answer of the oldest command that waits for one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rlhf_common import control_pb2 as pb

log = logging.getLogger(__name__)

BATCH_MESSAGES: Final = 512
"""Maximum messages sent at once."""
BATCH_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes sent at once, if more than one message is sent."""

GATHER_SECONDS: Final = 0.02
"""Seconds after a gathered message from which the next one of the same command or step wakes the writer."""


class SessionOutbox:
    """Unsent messages, in order of creation (`worker_role.Outbox`)."""

    def __init__(self, worker: str, wake: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        """`wake` is called from any thread when messages should be sent; `now` returns seconds."""
        self._worker = worker
        self._wake = wake
        self._lock = threading.Lock()
        self._messages: deque[pb.WorkerMessage] = deque()
        self._running: dict[int, bool] = {}  # command id -> answered (but not yet sent)
        self._names: dict[int, str] = {}  # command id -> its name
        self._fenced = False
        self._now = now
        self._gathering = 0  # identity of the thread inside `gathered`; 0: none
        self._quiet_since: float | None = None  # when the first message arrived without waking the writer
        self._tokens = 0
        self._moves: dict[str, tuple[int, float]] = {}
        self._last_train: pb.TrainResult | None = None

    # ------------------------------------------------------------ for roles

    def progress(self, message: pb.SampleProgress) -> None:
        """Report response tokens of an unfinished sample, from an offset on."""
        self._put(pb.WorkerMessage(progress=message))

    def finished(self, message: pb.FinishedSample) -> None:
        """Report a complete response."""
        self._put(pb.WorkerMessage(finished=message))

    def failed(self, message: pb.FailedSample) -> None:
        """Report that this worker cannot decode a sample."""
        self._put(pb.WorkerMessage(failed=message))

    def scored(self, message: pb.ScoredSample) -> None:
        """Report that a task is done for a sample (or failed, or abstained)."""
        self._put(pb.WorkerMessage(scored=message))

    def prefix(self, message: pb.ScoredPrefix) -> None:
        """Report that an unfinished sample was scored as far as it goes, or is not here."""
        self._put(pb.WorkerMessage(prefix=message))

    def done(self, message: pb.CommandDone) -> None:
        """Answer a command; drop an answer for which no command waits. Store the result of a successful Train."""
        with self._lock:
            if message.WhichOneof("result") == "train" and not message.HasField("failure"):
                self._last_train = message.train
            if self._running.get(message.command_id, True):
                log.info("the answer of command %d is dropped: no command waits for it any more", message.command_id)
                return
            self._running[message.command_id] = True
            self._messages.append(pb.WorkerMessage(done=message))
            self._quiet_since = None
        self._wake()

    def heartbeat(self, message: pb.Heartbeat) -> None:
        """Queue a heartbeat and wake the writer, before the next one is due."""
        self._put(pb.WorkerMessage(heartbeat=message), at_once=True)

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        """Report a span for the timeline."""
        span = pb.Span(worker=self._worker, name=name, start_ns=start_ns, end_ns=end_ns, iteration=iteration)
        span.attributes.update(attributes)
        self._put(pb.WorkerMessage(span=span))

    def observe(self, observation: pb.Observation) -> None:
        """Report the measured cost of some work, for the cost model."""
        self._put(pb.WorkerMessage(observation=observation))

    def count(self, tokens: int) -> None:
        """Add to the tokens of the heartbeat."""
        with self._lock:
            self._tokens += tokens

    def moved(self, kind: str, size: int, seconds: float) -> None:
        """Add to the moves in the worker's metrics."""
        with self._lock:
            before, since = self._moves.get(kind, (0, 0.0))
            self._moves[kind] = before + size, since + seconds

    # ------------------------------------------------------------ for the compute thread

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the messages of this thread until the end or for GATHER_SECONDS; one thread at a time."""
        with self._lock:
            self._gathering = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._gathering = 0
                waiting, self._quiet_since = self._quiet_since is not None, None
            if waiting:
                self._wake()

    def begin(self, command_id: int, name: str = "") -> bool:
        """Register a command that will be answered once; return False if its session broke: ignore it then."""
        with self._lock:
            if self._fenced:
                return False
            self._running[command_id], self._names[command_id] = False, name
            return True

    def unanswered(self) -> list[int]:
        """Return the commands without an answer, oldest first."""
        with self._lock:
            return [command for command, answered in self._running.items() if not answered]

    def reopen(self) -> None:
        """Accept messages again, for the new session; called when the samples were returned."""
        with self._lock:
            self._fenced = False

    def alarm(self, failure: pb.Failure) -> None:
        """Report a failure of the worker itself: CommandDone without a command."""
        with self._lock:
            self._messages.append(pb.WorkerMessage(done=pb.CommandDone(failure=failure)))
        self._wake()

    # ------------------------------------------------------------ for the session

    def unsent(self) -> list[pb.WorkerMessage]:
        """Return the oldest messages that fit into one Batch; `sent` removes them."""
        with self._lock:
            messages: list[pb.WorkerMessage] = []
            size = 0
            for message in self._messages:
                size += message.ByteSize()
                if messages and (size > BATCH_BYTES or len(messages) == BATCH_MESSAGES):
                    break
                messages.append(message)
            return messages

    def sent(self, messages: Sequence[pb.WorkerMessage]) -> None:
        """Remove messages that were sent; a sent answer ends its command."""
        with self._lock:
            for message in messages:
                self._messages.popleft()
                if message.WhichOneof("message") == "done":
                    self._running.pop(message.done.command_id, None)
                    self._names.pop(message.done.command_id, None)

    def fence(self) -> None:
        """Drop the messages of a broken session, except the answer of the oldest command whose answer was not sent.

        Until `reopen`, drop new messages other than that answer and alarms.
        """
        with self._lock:
            self._fenced = True
            unanswered = next(iter(self._running), None)
            self._running = {} if unanswered is None else {unanswered: self._running[unanswered]}
            self._names = {} if unanswered is None else {unanswered: self._names[unanswered]}
            answers = (message for message in self._messages if message.WhichOneof("message") == "done")
            self._messages = deque(message for message in answers if message.done.command_id == unanswered)

    def running(self) -> tuple[int, str]:
        """Return id and name of the oldest command whose answer was not sent; 0 and empty if there is none."""
        with self._lock:
            oldest = next(iter(self._running), 0)
            return oldest, self._names.get(oldest, "")

    @property
    def tokens(self) -> int:
        """The tokens counted since the process started."""
        with self._lock:
            return self._tokens

    def moves(self) -> dict[str, tuple[int, float]]:
        """Return (bytes, seconds) since the process started, by kind of move."""
        with self._lock:
            return dict(self._moves)

    @property
    def last_train(self) -> pb.TrainResult | None:
        """Return the result of the last successful Train of this process; None before the first."""
        with self._lock:
            return self._last_train

    def _put(self, message: pb.WorkerMessage, *, at_once: bool = False) -> None:
        with self._lock:
            if self._fenced:
                return
            self._messages.append(message)
            if not at_once and self._gathering == threading.get_ident():
                now = self._now()
                if self._quiet_since is None:
                    self._quiet_since = now
                if now - self._quiet_since < GATHER_SECONDS:
                    return
            self._quiet_since = None
        self._wake()
