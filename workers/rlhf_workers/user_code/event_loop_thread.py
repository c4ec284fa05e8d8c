"""A thread with an event loop for calls of rewards and environments.

Rule: other threads submit coroutines; only `close` blocks.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

CLOSE_SECONDS: Final = 5.0
"""Seconds to wait at close for the last coroutine, and then for the thread."""

T = TypeVar("T")


class EventLoopThread:
    """A daemon thread with a loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run the last coroutine and end the thread; raise TimeoutError when the coroutine takes too long."""
        try:
            self.run(last).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
