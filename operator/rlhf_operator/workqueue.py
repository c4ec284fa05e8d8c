"""The operator's work queue: the order of reconciles, their concurrency, and retries after failures.

A key waits in the queue at most once. The queue is in memory. Runs on one event loop, without locks; must never block
it.
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

FIRST_RETRY_SECONDS: Final = 0.5
"""Seconds of delay after a first failure."""
DEBOUNCE_SECONDS: Final = 0.2
"""Default debounce time: least seconds from the end of a key's work until an added key runs again."""
LAST_RETRY_SECONDS: Final = 60.0
"""Longest delay in seconds after a failure."""


@dataclass(frozen=True)
class QueueSnapshot:
    """State of the queue for health checks and metrics."""

    depth: int
    """Number of waiting keys."""
    active: int
    """Number of keys in work."""
    oldest_age_seconds: float
    """Seconds that the longest-waiting key has waited; 0 if none waits."""
    longest_active_seconds: float
    """Seconds that the longest current work has taken; 0 if idle."""


class WorkQueue:
    """Deduplicates keys, runs `work` on up to `concurrency` of them at once, and backs off after failures of a key."""

    def __init__(
        self, work: Callable[[str], Awaitable[float | None]], concurrency: int, debounce: float = DEBOUNCE_SECONDS
    ) -> None:
        """`work(key)` returns the seconds until the key is due again, or None; an error delays the key, longer each
        time.

        `debounce`: seconds before a key that was added during or after its work runs again.
        """
        self._work = work
        self._concurrency = concurrency
        self._waiting: deque[str] = deque()
        self._since: dict[str, float] = {}
        self._active: dict[str, float] = {}
        self._dirty: set[str] = set()
        self._debounce = debounce
        self._debounced: dict[str, float] = {}
        self._later: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: str) -> None:
        """Process `key` as soon as possible, after its work and the debounce time; no effect if it already waits."""
        if key in self._active:
            self._dirty.add(key)
        elif (left := self._debounced.get(key, 0.0) - self._now()) > 0:
            self.add_after(key, left)
        else:
            self._put(key)

    def _put(self, key: str) -> None:
        if key not in self._since:
            self._since[key] = self._now()
            self._waiting.append(key)
            self._wake.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Process `key` in `seconds`, or earlier if that was requested."""
        due = self._now() + seconds
        if self._due.get(key, due + 1) > due:
            self._due[key] = due
            heapq.heappush(self._later, (due, key))
            self._wake.set()

    def forget(self, key: str) -> None:
        """Drop planned work of a key, and its count of failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    def failures(self, key: str) -> int:
        """Return the consecutive failures of a key."""
        return self._failures.get(key, 0)

    def snapshot(self) -> QueueSnapshot:
        """Return the current state of the queue."""
        now = self._now()
        oldest = self._since[self._waiting[0]] if self._waiting else now
        slowest = min(self._active.values(), default=now)
        return QueueSnapshot(len(self._waiting), len(self._active), now - oldest, now - slowest)

    async def run(self) -> None:
        """Process keys until cancelled; work in progress is cancelled too."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._collect_due()
                while self._waiting and len(self._active) < self._concurrency:
                    key = self._waiting.popleft()
                    del self._since[key]
                    self._active[key] = self._now()
                    tasks.create_task(self._serve(key))
                self._wake.clear()
                await self._sleep()

    async def _serve(self, key: str) -> None:
        try:
            requeue_after = await self._work(key)
        except Exception:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            requeue_after = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 16))
        else:
            self._failures.pop(key, None)
        del self._active[key]
        self._debounced.pop(key, None)
        self._debounced[key] = self._now() + self._debounce
        if requeue_after is not None:
            self.add_after(key, requeue_after)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)
        self._wake.set()

    def _collect_due(self) -> None:
        now = self._now()
        while self._debounced and next(iter(self._debounced.values())) <= now:
            del self._debounced[next(iter(self._debounced))]
        while self._later and self._later[0][0] <= now:
            due, key = heapq.heappop(self._later)
            if self._due.get(key) == due:
                del self._due[key]
                if key in self._active:
                    self._dirty.add(key)
                else:
                    self._put(key)

    async def _sleep(self) -> None:
        """Wait until a key is added, work ends, or the next planned work is due."""
        timeout = max(0.0, self._later[0][0] - self._now()) if self._later else None
        # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the event it waits for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
