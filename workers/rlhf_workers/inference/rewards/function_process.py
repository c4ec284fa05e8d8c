"""One child process running a reward function, as the worker sees it: started, called, killed.

Rule: the child gets a minimal environment (no token, no address of ours) and what the manifest names for it, and every
wait on it ends: a call is awaited by someone with a time-out, who kills the child. Must never be used again after
`kill`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rlhf_api.names import ExitCode
from rlhf_api.samples import ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.function_host import HIDE
from rlhf_workers.inference.rewards.reward_settings import NO_SETTINGS, RewardSettings
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError, described, judgment

LINE_BYTES: Final = 1024 * 1024
"""Longest reply; messages are cut far below."""
PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment the child inherits: what Python and its libraries need to start, nothing that opens a door."""


class ChildGoneError(Exception):
    """The child ended before it answered."""


def child_environment(
    environ: Mapping[str, str], threads: int, settings: RewardSettings = NO_SETTINGS
) -> dict[str, str]:
    """What the child sees. A fixed hash seed: sets and dicts of strings are walked in one order in every process."""
    passed = {name: environ[name] for name in PASSED_ON if name in environ} | dict(settings.values)
    if settings.secret:
        passed[HIDE] = ",".join(sorted(settings.secret))
    return passed | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}


class RewardChild:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, field: str) -> None:
        """`field`: the function's in the manifest."""
        self._field = field
        self.is_async = False
        self.killed = False
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        threads: int,
        load_seconds: float,
        settings: RewardSettings = NO_SETTINGS,
        *,
        field: str,
    ) -> "RewardChild":
        """A child that loaded the function of this manifest field; WorkError RewardFunctionInvalid (exit code 20) when
        it cannot."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlhf_workers.inference.rewards.function_host",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(os.environ, threads, settings),
            limit=LINE_BYTES,
        )
        child = cls(process, field)
        try:
            await child._load(load_seconds)
        except BaseException:
            await child._end()
            raise
        return child

    @property
    def usable(self) -> bool:
        """Whether calls may be sent."""
        return not self.killed and self._reader is not None and not self._reader.done()

    async def call(self, samples: Sequence[ScoringSample], *, many: bool) -> list[Judgment]:
        """Return what one call of the function says of samples; with `many` it is given lists, else the only sample.

        RewardError when the function failed, ChildGoneError when the process did.
        """
        self._calls += 1
        number = self._calls
        request = {"id": number, "many": many, "samples": [described(sample) for sample in samples]}
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(ConnectionError):  # the reader tells how it ended
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
            if not self.usable:
                raise ChildGoneError(self._ended())
            reply = await future
        finally:
            self._waiting.pop(number, None)
        if "reason" in reply:
            raise RewardError(reply["reason"], reply["message"], self._field)
        judged = [judgment(each["reward"], each["metrics"], self._field) for each in reply["rewards"]]
        if len(judged) != len(samples):
            raise RewardError("RewardInvalid", f"{len(judged)} rewards for {len(samples)} responses", self._field)
        return judged

    def kill(self) -> None:
        """Ends the child at once; calls in flight get ChildGoneError."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kills the child and waits until it is gone."""
        self.kill()
        assert self._reader is not None
        await asyncio.wait({self._reader})

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Calls back once the process has ended, for whatever reason."""
        assert self._reader is not None
        self._reader.add_done_callback(lambda _: callback())

    async def _load(self, load_seconds: float) -> None:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), load_seconds)
        except TimeoutError:
            raise self._unusable("", f"the reward function's module did not load within {load_seconds:g} s") from None
        if not line:
            await self._process.wait()
            raise self._unusable("", f"the process that loads the reward function ended: {self._ended()}")
        reply = json.loads(line)
        if "failed" in reply:
            raise self._unusable(reply["part"], reply["failed"])
        self.is_async = reply["ready"] == "async"
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                reply = json.loads(line)
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        finally:
            await self._end()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ChildGoneError(self._ended()))

    async def _end(self) -> None:
        """Nothing of the process is left: neither it nor its pipes."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not Process.kill: it polls, and so takes the exit status of a dead child from asyncio, which says 255.
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.wait_closed()

    def _ended(self) -> str:
        code = self._process.returncode
        if code is None:
            return "it closed its output"
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _unusable(self, part: str, message: str) -> WorkError:
        field = f"{self._field}.{part}" if part else self._field
        return WorkError("RewardFunctionInvalid", f"{field}: {message}", field=field, exit_code=ExitCode.USER_CODE)
