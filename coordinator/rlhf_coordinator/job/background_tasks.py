"""Tasks that run beside the loop, for example simulations in threads or searches in child processes.

An exception that a task does not catch is logged with the task's name.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class BackgroundTasks:
    """The tasks of one job."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """The names of the running tasks, sorted."""
        return sorted(task.get_name() for task in self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task. An earlier task of the same name continues."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel_all(self) -> None:
        """Cancel every running task and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed: %s", task.get_name(), error, exc_info=error)
