"""Rewards by a user's Python function, run in child processes that can be killed when they hang.

A synchronous function has one call at a time in a child; while calls wait, more children are started, up to a limit. An
asynchronous function has many calls at once in one child. Rule: a call that takes longer than the job allows is a
failure of its sample and its child is killed; calls that shared the child are made again. Never a zero reward.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rewards import GivenReward, RewardFunction
from rlhf_api.samples import ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.function_process import ChildGoneError, RewardChild
from rlhf_workers.inference.rewards.reward_settings import NO_SETTINGS, RewardSettings, resolve_settings
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError

CHILDREN: Final = min(8, os.cpu_count() or 1)
"""Processes of a synchronous function at most; they compete with the worker's own models for cores."""
GROW_SECONDS: Final = 0.25
"""A call waits this long for a child before another is started: quick functions never need a second."""
CALLS: Final = 64
"""Calls in flight of an asynchronous function."""
LOAD_SECONDS: Final = 60.0
"""Time the user's module may take to import."""


def load_reward(given: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> "FunctionReward":
    """Return the source of a reward's `function`; it needs no device."""
    function, threads = given.reward.function, spec.inference.cpu_threads
    assert function is not None
    env = f"{given.field}.function.env"
    settings = resolve_settings(function.env, env, spec.models.secret_variables(), os.environ)
    return FunctionReward(function, given.reward.timeout_seconds, threads, settings=settings, field=given.field)


class FunctionReward:
    """A RewardSource over child processes."""

    def __init__(
        self,
        function: RewardFunction,
        timeout_seconds: float,
        threads: int,
        children: int = CHILDREN,
        settings: RewardSettings = NO_SETTINGS,
        *,
        field: str,
    ) -> None:
        """`settings`: variables of its process; `field`: the reward's in the manifest."""
        self._given = settings
        self._field, self._timeout_field = f"{field}.function", f"{field}.timeoutSeconds"
        self._arguments = _arguments(function, self._field)
        self._timeout = timeout_seconds
        self._threads = threads
        self._limit = children
        self._children: set[RewardChild] = set()  # that may be called
        self._processes: set[RewardChild] = set()  # that may still run
        self._starting = 0
        self._idle: asyncio.LifoQueue[RewardChild | None] = asyncio.LifoQueue()  # None: there is room for a new one
        self._async_calls = asyncio.Semaphore(CALLS)
        self._async_start = asyncio.Lock()
        self._shared: RewardChild | None = None

    async def start(self) -> None:
        """Starts the first child: a function that cannot be loaded fails here, naming field and line."""
        child = await self._start_child()
        if child.is_async:
            self._shared = child
        else:
            self._idle.put_nowait(child)

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the reward of one sample."""
        return (await self._judge(_FunctionCall([sample], many=False)))[0]

    async def score_group(self, samples: Sequence[ScoringSample]) -> list[Judgment]:
        """Return the rewards of several samples, by one call with lists."""
        return await self._judge(_FunctionCall(samples, many=True))

    async def _judge(self, call: "_FunctionCall") -> list[Judgment]:
        """Call the function; the call is made again when a neighbour's time-out takes the child away."""
        while True:
            try:
                return await (self._score_alone(call) if self._shared is None else self._score_shared(call))
            except _NeighbourKilledError:
                continue

    async def close(self) -> None:
        """Kills every child."""
        await asyncio.gather(*(child.close() for child in self._processes))

    # ------------------------------------------------------------ synchronous functions

    async def _score_alone(self, call: "_FunctionCall") -> list[Judgment]:
        child = await self._take()
        try:
            return await self._call(child, call)
        finally:
            if not child.usable:
                self._discard(child)
            self._idle.put_nowait(child if child.usable else None)

    async def _take(self) -> RewardChild:
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

    def _discard(self, child: RewardChild) -> None:
        self._children.discard(child)

    # ------------------------------------------------------------ asynchronous functions

    async def _score_shared(self, call: "_FunctionCall") -> list[Judgment]:
        async with self._async_calls:
            async with self._async_start:
                if self._shared is None or not self._shared.usable:
                    self._shared = await self._start_child()
                child = self._shared
            try:
                return await self._call(child, call)
            finally:
                if not child.usable:
                    self._discard(child)

    # ------------------------------------------------------------ both

    async def _start_child(self) -> RewardChild:
        self._starting += 1
        try:
            child = await RewardChild.start(
                self._arguments, self._threads, max(LOAD_SECONDS, self._timeout), self._given, field=self._field
            )
            self._children.add(child)
            self._processes.add(child)
            child.when_gone(partial(self._processes.discard, child))
        except BaseException:
            self._idle.put_nowait(None)
            raise
        finally:
            self._starting -= 1
        return child

    async def _call(self, child: RewardChild, call: "_FunctionCall") -> list[Judgment]:
        try:
            return await asyncio.wait_for(child.call(call.samples, many=call.many), self._timeout)
        except TimeoutError:
            child.kill()
            message = f"the function did not return within {self._timeout:g} s; its process was killed"
            raise RewardError("RewardTimeout", message, self._timeout_field) from None
        except ChildGoneError as error:
            if child.killed:
                raise _NeighbourKilledError from error
            child.kill()
            raise RewardError("RewardDied", f"the function's process ended: {error}", self._field) from error
        except asyncio.CancelledError:
            child.kill()
            raise


@dataclass(frozen=True)
class _FunctionCall:
    """One call of the function: with lists, or with a single sample."""

    samples: Sequence[ScoringSample]
    many: bool


class _NeighbourKilledError(Exception):
    """The child was killed because of another call."""


def _arguments(function: RewardFunction, path: str) -> list[str]:
    if function.file:
        return ["--file", function.file, "--name", function.name]
    if function.module:
        return ["--module", function.module, "--name", function.name]
    field = f"{path}.configMap"
    message = f"{field}: {function.config_map!r} is not mounted; a resolved job names the mounted file instead"
    raise WorkError("RewardFunctionInvalid", message, field=field)
