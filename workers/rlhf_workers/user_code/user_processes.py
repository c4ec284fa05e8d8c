"""Calls users' code in child processes.

A child runs one call of synchronous code, or many calls of asynchronous code, at a time.

Rule: a call that exceeds its time-out fails and its child is killed; other calls in that child are repeated.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from rlhf_workers.user_code.user_process import ChildGoneError, UserCode, UserCodeError, UserProcess

CHILDREN: Final = min(8, os.cpu_count() or 1)
"""Maximum processes of synchronous code."""
GROW_SECONDS: Final = 0.25
"""Seconds that a call waits for an idle child before another starts."""
CALLS: Final = 64
"""Maximum concurrent calls of asynchronous code."""
LOAD_SECONDS: Final = 60.0
"""Seconds that the import of the user's module may take, unless the time-out of calls is longer."""

T = TypeVar("T")
Work = Callable[[UserProcess], Awaitable[T]]
"""One call on any child; repeated when the end of another call kills the child."""


class UserProcesses:
    """The children that run one user's code; all methods run on one event loop."""

    def __init__(self, code: UserCode, timeout_seconds: float, timeout_field: str, children: int = CHILDREN) -> None:
        """`timeout_field` is the manifest field that messages name."""
        self._code, self._timeout, self._timeout_field = code, timeout_seconds, timeout_field
        self._limit = children
        self._children: set[UserProcess] = set()  # can be called
        self._processes: set[UserProcess] = set()  # may still run
        self._starting = 0
        self._idle: asyncio.LifoQueue[UserProcess | None] = asyncio.LifoQueue()  # None: a new child may start
        self._async_calls = asyncio.Semaphore(CALLS)
        self._async_start = asyncio.Lock()
        self._shared: UserProcess | None = None

    async def start(self) -> None:
        """Start the first child; code that cannot be loaded fails here, with its field."""
        child = await self._start_child()
        if child.is_async:
            self._shared = child
        else:
            self._idle.put_nowait(child)

    async def run(self, work: Work[T], seconds: float | None = None) -> T:
        """Return the result of `work`, which may take `seconds` (None: the manifest's time-out) once it has a child.

        Raises UserCodeError if it fails, and WorkError if a new child cannot load the code.
        """
        seconds = self._timeout if seconds is None else seconds
        while True:
            try:
                return await (
                    self._run_alone(work, seconds) if self._shared is None else self._run_shared(work, seconds)
                )
            except _NeighbourKilledError:
                continue

    async def close(self) -> None:
        """Kill every child."""
        await asyncio.gather(*(child.close() for child in self._processes))

    # ------------------------------------------------------------ synchronous code

    async def _run_alone(self, work: Work[T], seconds: float) -> T:
        child = await self._take()
        try:
            return await self._call(child, work, seconds)
        finally:
            if not child.usable:
                self._discard(child)
            self._idle.put_nowait(child if child.usable else None)

    async def _take(self) -> UserProcess:
        while True:
            if self._idle.empty() and self._room and not self._children:
                return await self._start_child()
            try:
                child = await asyncio.wait_for(self._idle.get(), GROW_SECONDS if self._room else None)
            except TimeoutError:
                if self._room:
                    return await self._start_child()
                continue
            if child is not None and child.usable:
                return child
            if child is not None:
                self._discard(child)

    @property
    def _room(self) -> bool:
        return len(self._children) + self._starting < self._limit

    def _discard(self, child: UserProcess) -> None:
        self._children.discard(child)

    # ------------------------------------------------------------ asynchronous code

    async def _run_shared(self, work: Work[T], seconds: float) -> T:
        async with self._async_calls:
            async with self._async_start:
                if self._shared is None or not self._shared.usable:
                    self._shared = await self._start_child()
                child = self._shared
            try:
                return await self._call(child, work, seconds)
            finally:
                if not child.usable:
                    self._discard(child)

    # ------------------------------------------------------------ both

    async def _start_child(self) -> UserProcess:
        self._starting += 1
        try:
            child = await UserProcess.start(self._code, max(LOAD_SECONDS, self._timeout))
            self._children.add(child)
            self._processes.add(child)
            child.when_gone(partial(self._processes.discard, child))
        except BaseException:
            self._idle.put_nowait(None)
            raise
        finally:
            self._starting -= 1
        return child

    async def _call(self, child: UserProcess, work: Work[T], seconds: float) -> T:
        code = self._code
        try:
            return await asyncio.wait_for(work(child), seconds)
        except TimeoutError:
            child.kill()
            message = f"the {code.name} did not return within {seconds:g} s; its process was killed"
            raise UserCodeError(f"{code.reason}Timeout", message, self._timeout_field) from None
        except ChildGoneError as error:
            if child.killed:
                raise _NeighbourKilledError from error
            child.kill()
            raise UserCodeError(
                f"{code.reason}Died", f"the {code.name}'s process ended: {error}", code.manifest_field
            ) from error
        except asyncio.CancelledError:
            child.kill()
            raise


class _NeighbourKilledError(Exception):
    """The child was killed because of another call."""
