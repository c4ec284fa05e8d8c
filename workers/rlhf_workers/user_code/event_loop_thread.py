"""A thread with an event loop, on which calls of users' code are awaited while the compute thread works.

Rule: the compute thread hands in coroutines and never waits for them but at start and close.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

CLOSE_SECONDS: Final = 5.0
"""Children are killed, not asked; this is for a loop that is stuck."""

T = TypeVar("T")


class EventLoopThread:
    """A daemon thread: a loop that is stuck holds up no exit."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs the last coroutine and ends the thread; TimeoutError when the loop is stuck."""
        try:
            self.run(last).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
