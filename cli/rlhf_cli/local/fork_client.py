"""Client of the fork server (`rlhf_workers.fork_server`), which forks workers after importing torch and transformers.

Rule: only workers on CPU with one compute thread are forked.
"""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as Child
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_cli.local import exec_wrapper
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_common.names import Env

WORKER: Final = ("-m", "rlhf_workers")
"""Interpreter arguments of a process that can be forked."""
READY_SECONDS: Final = 120.0
"""Seconds that the server gets to become ready."""
LOG: Final = "fork-server.log"


class ForkServerError(Exception):
    """Forking failed; the message says why."""


def forkable(process: LocalProcess) -> bool:
    """Return whether a process can be forked: a worker without an accelerator, with one compute thread."""
    env = process.env
    return process.command[1:] == WORKER and not env.get("CUDA_VISIBLE_DEVICES") and env.get(Env.THREADS, "1") == "1"


class ForkedProcess:
    """A forked worker, with the part of asyncio's Process that the supervisor uses."""

    def __init__(self, pid: int, code: "asyncio.Future[int]") -> None:
        self.pid = pid
        self._code = code

    async def wait(self) -> int:
        """Wait for the process to end. Return its exit code; a negative number is the signal."""
        return await asyncio.shield(self._code)


class ForkServerClient:
    """The connection to the server process, which starts with the first worker."""

    def __init__(self, token: Mapping[str, str]) -> None:
        """`token` is the environment variable that identifies leftover processes of the run."""
        self._token = token
        self._lock = asyncio.Lock()
        self._server: Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._forked: asyncio.Queue[ForkedProcess | None] = asyncio.Queue()
        self.broken = ""
        """Reason why no server can be started; empty while one can."""

    async def start(self, process: LocalProcess) -> ForkedProcess:
        """Fork a worker and return it. Raises ForkServerError; `broken` then says whether another attempt makes
        sense."""
        async with self._lock:
            if self.broken:  # set while this call waited for another call to start the server
                raise ForkServerError(self.broken)
            if self._reader is None or self._reader.done():  # no server yet, or it died
                await self._open(process)
            server = self._server
            assert server is not None
            assert server.stdin is not None
            order = {
                "name": process.name,
                "environment": {**os.environ, **process.env, **self._token},
                "folder": str(process.folder),
                "log": str(process.log),
                "cores": sorted(process.cores) if process.cores else None,
            }
            with contextlib.suppress(ConnectionError):
                server.stdin.write(json.dumps(order).encode() + b"\n")
                await server.stdin.drain()
            forked = await self._forked.get()
            if forked is None:
                raise ForkServerError("the process that workers are forked from has died")
            return forked

    def kill(self) -> None:
        """Kill the server; its workers die with it."""
        if self._server is not None and self._server.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._server.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """Kill the server and wait for its end."""
        self.kill()
        if self._server is not None:
            await self._server.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _open(self, process: LocalProcess) -> None:
        log = process.log.with_name(LOG)
        self._server = await self._begin(process, log)
        stdout = self._server.stdout
        assert stdout is not None
        self._forked = asyncio.Queue()
        try:
            async with asyncio.timeout(READY_SECONDS):
                ready = await stdout.readline()
        except TimeoutError:
            ready = b""
        if not ready:
            self.kill()
            self.broken = f"workers are started one by one: see {log}"
            raise ForkServerError(self.broken)
        self._reader = asyncio.create_task(self._read(stdout, self._forked))

    async def _begin(self, process: LocalProcess, log: Path) -> Child:
        """Start the server's process, in the environment and the folder of a worker."""
        with log.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                *exec_wrapper.wrapper_command(None),
                *(process.command[0], "-m", "rlhf_workers.fork_server"),
                env={**os.environ, **process.env, **self._token},
                cwd=process.folder,
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                start_new_session=True,
            )

    async def _read(self, stdout: asyncio.StreamReader, forked: "asyncio.Queue[ForkedProcess | None]") -> None:
        """Read replies until the server ends. A process may end, or the server die, before `start` has taken it."""
        running: dict[int, asyncio.Future[int]] = {}
        while line := await stdout.readline():
            reply: dict[str, Any] = json.loads(line)
            if "pid" in reply:
                code = running[reply["pid"]] = asyncio.get_running_loop().create_future()
                forked.put_nowait(ForkedProcess(reply["pid"], code))
            else:
                running.pop(reply["ended"]).set_result(reply["code"])
        for code in running.values():
            code.set_result(-signal.SIGKILL)
        forked.put_nowait(None)
