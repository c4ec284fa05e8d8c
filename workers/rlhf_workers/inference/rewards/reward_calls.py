"""Runs reward calls beside the compute thread: a thread with an event loop awaits a source for many samples.

Rule: the compute thread submits and collects without waiting. Must never turn an exception into a number.
"""

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.failures import failure_of
from rlhf_workers.inference.rewards.reward_source import GroupRewardSource, Judgment, RewardSource
from rlhf_workers.sample_codec import key_message
from rlhf_workers.user_code.event_loop_thread import EventLoopThread
from rlhf_workers.worker_role import Outbox

SPAN_TASK: Final = "score/{task}"


@dataclass(frozen=True)
class RewardOutcome:
    """Result of one sample."""

    sample: ScoringSample
    judgment: Judgment | None
    failure: pb.Failure | None
    """The failure; set exactly if `judgment` is None."""
    start_ns: int
    end_ns: int


class RewardCalls:
    """Runs a RewardSource on a separate thread."""

    def __init__(self, source: RewardSource) -> None:
        self._source = source
        self._outcomes: queue.SimpleQueue[tuple[int, RewardOutcome]] = queue.SimpleQueue()
        self._loop = EventLoopThread("rewards")
        self._running: dict[int, Future[None]] = {}  # number of the call -> its task
        self._calls = 0

    def start(self) -> None:
        """Start the thread and the source; raise the source's errors."""
        self._loop.start()
        try:
            self._loop.run(self._source.start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def judges_groups(self) -> bool:
        """Whether the source can judge the responses to a prompt together."""
        return isinstance(self._source, GroupRewardSource)

    @property
    def pending(self) -> int:
        """Samples submitted and not yet collected."""
        return len(self._running)

    def submit(self, sample: ScoringSample) -> None:
        """Score a sample when the source has capacity."""
        self._calls += 1
        self._running[self._calls] = self._loop.run(self._score(self._calls, sample))

    def submit_group(self, samples: Sequence[ScoringSample]) -> None:
        """Judge all responses to one prompt together when the source has capacity."""
        numbers = [self._calls + 1 + place for place in range(len(samples))]
        self._calls += len(samples)
        future = self._loop.run(self._score_group(numbers, samples))
        self._running |= dict.fromkeys(numbers, future)

    def collect(self) -> list[RewardOutcome]:
        """Return the outcomes since the last call, in order of arrival."""
        outcomes = []
        while not self._outcomes.empty():
            number, outcome = self._outcomes.get()
            if self._running.pop(number, None) is not None:
                outcomes.append(outcome)
        return outcomes

    def report(self, task: str, outbox: Outbox) -> bool:
        """Report the outcomes since the last call as results of a task; return whether there were any."""
        outcomes = self.collect()
        for outcome in outcomes:
            message = pb.ScoredSample(key=key_message(outcome.sample.key), task=task)
            judged = outcome.judgment
            if outcome.failure is not None:
                message.failure.CopyFrom(outcome.failure)
            elif judged is not None:
                message.metrics.update(judged.metrics)
                message.abstained = judged.reward is None
            if judged is not None and judged.reward is not None:
                result: FloatArray = np.array([judged.reward], dtype=np.float32)
                message.result.CopyFrom(pack(result))
            outbox.scored(message)
        if outcomes:
            start, end = min(outcome.start_ns for outcome in outcomes), max(outcome.end_ns for outcome in outcomes)
            iteration = outcomes[0].sample.key.iteration
            outbox.span(SPAN_TASK.format(task=task), start, end, iteration, samples=str(len(outcomes)))
        return bool(outcomes)

    def forget(self) -> None:
        """Cancel all submitted samples."""
        for future in self._running.values():
            future.cancel()
        self._running.clear()

    def close(self) -> None:
        """End source and thread."""
        self.forget()
        self._loop.close(self._source.close())

    async def _score(self, number: int, sample: ScoringSample) -> None:
        start_ns = time.time_ns()
        judgment, failure = None, None
        try:
            judgment = await self._source.score(sample)
        except Exception as error:
            failure = failure_of(error, "reward")
        self._outcomes.put((number, RewardOutcome(sample, judgment, failure, start_ns, time.time_ns())))

    async def _score_group(self, numbers: Sequence[int], samples: Sequence[ScoringSample]) -> None:
        assert isinstance(self._source, GroupRewardSource)
        start_ns = time.time_ns()
        judgments: Sequence[Judgment | None] = [None] * len(samples)
        failure = None
        try:
            judgments = await self._source.score_group(samples)
            if len(judgments) != len(samples):
                raise ValueError(f"{len(judgments)} rewards came for the {len(samples)} responses to a prompt")
        except Exception as error:
            judgments, failure = [None] * len(samples), failure_of(error, "reward")
        end_ns = time.time_ns()
        for number, sample, judgment in zip(numbers, samples, judgments, strict=True):
            self._outcomes.put((number, RewardOutcome(sample, judgment, failure, start_ns, end_ns)))
