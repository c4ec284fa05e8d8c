"""One child process running a user's code, as the worker sees it: started, called, killed.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.user_code.user_host import HIDE

LINE_BYTES: Final = 1024 * 1024
"""Longest reply; messages are cut far below."""
PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment the child inherits: what Python and its libraries need to start, nothing that opens a door."""


class ChildGoneError(Exception):
    """The child ended before it answered."""


class UserCodeError(WorkError):
    """One call of the user's code failed; another may succeed. When it is not retried the job ends with USER_CODE."""

    def __init__(self, reason: str, message: str, field: str, *, retryable: bool = True) -> None:
        super().__init__(reason, message, field=field, retryable=retryable, exit_code=ExitCode.USER_CODE)


@dataclass(frozen=True)
class UserCode:
    """Which code of a user a child runs, and how messages speak of it."""

    host: str
    """Module of the child."""
    name: str
    """What messages call it, such as function."""
    reason: str
    """First word of the reasons of its failures, such as Reward."""
    invalid: str
    """Reason of the failure where it cannot be loaded."""
    arguments: tuple[str, ...]
    """Of the command line: where the code is."""
    manifest_field: str
    """The code's in the manifest."""
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beside those that Python needs."""
    secret: frozenset[str] = frozenset()
    """Variables whose value no text may quote."""


def child_environment(
    environ: Mapping[str, str],
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
    secret: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """What the child sees. A fixed hash seed: sets and dicts of strings are walked in one order in every process."""
    passed = {name: environ[name] for name in PASSED_ON if name in environ} | dict(variables)
    if secret:
        passed[HIDE] = ",".join(sorted(secret))
    return passed | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}


class UserProcess:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, code: UserCode) -> None:
        self._code = code
        self.is_async = False
        self.killed = False
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, code: UserCode, load_seconds: float) -> Self:
        """A child that loaded the code; WorkError with the code's reason `invalid` (exit code 20) when it cannot."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            code.host,
            *code.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(os.environ, code.threads, code.variables, code.secret),
            limit=LINE_BYTES,
        )
        child = cls(process, code)
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

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the child's reply to a request; UserCodeError when the code failed, ChildGoneError when the process
        did."""
        self._calls += 1
        number = self._calls
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(ConnectionError):  # the reader tells how it ended
                self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                await self._process.stdin.drain()
            if not self.usable:
                raise ChildGoneError(self._ended())
            reply: dict[str, Any] = await future
        finally:
            self._waiting.pop(number, None)
        if "reason" in reply:
            raise UserCodeError(reply["reason"], reply["message"], self._code.manifest_field)
        return reply

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
            message = f"the {self._code.name}'s module did not load within {load_seconds:g} s"
            raise self._unusable("", message) from None
        if not line:
            await self._process.wait()
            raise self._unusable("", f"the process that loads the {self._code.name} ended: {self._ended()}")
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
        path = f"{self._code.manifest_field}.{part}" if part else self._code.manifest_field
        return WorkError(self._code.invalid, f"{path}: {message}", field=path, exit_code=ExitCode.USER_CODE)
