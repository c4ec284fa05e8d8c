"""Reward calls, concurrent with the compute thread: a thread with an event loop awaits a source for many samples.

Rule: the compute thread submits and collects, and never waits; every submitted sample comes back exactly once as an
outcome, unless it was forgotten. Must never turn an exception into a number.
"""

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.samples import ScoringSample
from rlhf_workers.failures import failure_of
from rlhf_workers.inference.rewards.reward_source import RewardSource

CLOSE_SECONDS: Final = 5.0
"""Children are killed, not asked; this is for a loop that is stuck."""


@dataclass(frozen=True)
class RewardOutcome:
    """What became of one sample; `reward` None without a failure means abstained."""

    sample: ScoringSample
    reward: float | None
    failure: pb.Failure | None
    start_ns: int
    end_ns: int


class RewardCalls:
    """Runs a RewardSource on a thread of its own."""

    def __init__(self, source: RewardSource) -> None:
        self._source = source
        self._outcomes: queue.SimpleQueue[tuple[int, RewardOutcome]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._running: dict[int, Future[None]] = {}  # number of the call -> its task
        self._calls = 0

    def start(self) -> None:
        """Starts the thread and the source; raises what the source raises."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._source.start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> int:
        """Samples submitted and not yet collected."""
        return len(self._running)

    def submit(self, sample: ScoringSample) -> None:
        """Scores the sample as soon as the source has room."""
        self._calls += 1
        self._running[self._calls] = asyncio.run_coroutine_threadsafe(self._score(self._calls, sample), self._loop)

    def collect(self) -> list[RewardOutcome]:
        """Outcomes since the last call, in the order they came."""
        outcomes = []
        while not self._outcomes.empty():
            number, outcome = self._outcomes.get()
            if self._running.pop(number, None) is not None:
                outcomes.append(outcome)
        return outcomes

    def forget(self) -> None:
        """Cancels everything that is submitted."""
        for future in self._running.values():
            future.cancel()
        self._running.clear()

    def close(self) -> None:
        """Ends source and thread."""
        self.forget()
        try:
            asyncio.run_coroutine_threadsafe(self._source.close(), self._loop).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _score(self, number: int, sample: ScoringSample) -> None:
        start_ns = time.time_ns()
        reward, failure = None, None
        try:
            reward = await self._source.score(sample)
        except Exception as error:
            failure = failure_of(error, "reward")
        self._outcomes.put((number, RewardOutcome(sample, reward, failure, start_ns, time.time_ns())))
