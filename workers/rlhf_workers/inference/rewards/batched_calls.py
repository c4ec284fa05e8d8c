"""Judges many samples per call: samples that wait when a call ends go into the next call together.

Rule: there is no timer. A batch that fails with RewardError is repeated for each of its samples alone.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.rewards.reward_source import GroupRewardSource, Judgment, RewardError

CALLS: Final = 2
"""Maximum concurrent batches."""

_Waiting = tuple[ScoringSample, asyncio.Future[Judgment]]


class BatchedReward:
    """A RewardSource that asks another source about several samples at once."""

    def __init__(self, source: GroupRewardSource, size: int) -> None:
        """`size`: maximum samples of a call."""
        self._source, self._size = source, size
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See RewardSource."""
        await self._source.start()

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the judgment of this sample from a call that it may share with others."""
        future: asyncio.Future[Judgment] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        self._begin()
        return await future

    async def close(self) -> None:
        """See RewardSource."""
        for task in self._tasks:
            task.cancel()
        await self._source.close()

    def _begin(self) -> None:
        while self._waiting and len(self._tasks) < CALLS:
            batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._begin()

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        wanted = [(sample, future) for sample, future in batch if not future.done()]  # some may be cancelled
        if not wanted:
            return
        try:
            judged = await self._source.score_group([sample for sample, _ in wanted])
        except RewardError as error:
            if len(wanted) > 1:
                await asyncio.gather(*(self._run([each]) for each in wanted))
                return
            _fail(wanted, error)
        except Exception as error:
            _fail(wanted, error)
        else:
            for (_, future), judgment in zip(wanted, judged, strict=True):
                if not future.done():
                    future.set_result(judgment)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
