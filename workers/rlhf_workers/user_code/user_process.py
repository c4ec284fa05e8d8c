"""One child process that runs a user's code: starting, calling and killing it.

Rule: the child gets a minimal environment (no token, no address of ours) plus the variables in the manifest. Must never
be used after `kill`.
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
"""Longest reply in bytes; a longer one ends the child."""
PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that the child inherits."""


class ChildGoneError(Exception):
    """The child ended before it answered."""


class UserCodeError(WorkError):
    """One call of the user's code failed; another may succeed if `retryable`. Exit code: USER_CODE."""

    def __init__(self, reason: str, message: str, field: str, *, retryable: bool = True) -> None:
        super().__init__(reason, message, field=field, retryable=retryable, exit_code=ExitCode.USER_CODE)


@dataclass(frozen=True)
class UserCode:
    """The code that a child runs, and its names in messages."""

    host: str
    """Module that the child runs."""
    name: str
    """Name in messages, such as function."""
    reason: str
    """Prefix of its failure reasons, such as Reward."""
    invalid: str
    """Failure reason if the code cannot be loaded."""
    arguments: tuple[str, ...]
    """Command-line arguments that locate the code."""
    manifest_field: str
    """Manifest field of the code."""
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional variables of its environment."""
    secret: frozenset[str] = frozenset()
    """Variables whose value no text may quote."""


def child_environment(
    environ: Mapping[str, str],
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
    secret: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Return the environment of the child.

    The hash seed is fixed, so that sets of strings have the same order in every process.
    """
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
        """Start a child that has loaded the code; WorkError with reason `invalid` (exit code 20) if loading fails."""
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
        """Return the child's reply; UserCodeError if the code failed, ChildGoneError if the process ended."""
        self._calls += 1
        number = self._calls
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(ConnectionError):  # the reader reports how the process ended
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
        """Kill the child; running calls get ChildGoneError."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kill the child and wait until it has ended."""
        self.kill()
        assert self._reader is not None
        await asyncio.wait({self._reader})

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once the process has ended, for any reason."""
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
        """End the process and close its input."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Process.kill would poll and take the exit status of a dead child; asyncio then reports 255.
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
