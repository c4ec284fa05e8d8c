"""Forks whole `rlhf run`s, and the processes that their workers are forked from, from one process with all imports.

`python -m tests.support.jobs.run_server rlhf_workers.fork_server` speaks the protocol of `rlhf_workers.fork_server`; an
order has `arguments` besides, those of `rlhf`. A run differs from one that a person starts in two ways: its imports are
already done, and its fork server was forked, before the run had a thread, instead of executed.

Rule: a run makes its decisions with its own code; only the start of two processes differs. A fork server that is needed
again, such as after its death, is executed as usual. All runs of one server share Python's hash seed, so a test that
needs another seed executes its runs. Must never serve anything but tests.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from rlhf_workers.fork_server import PR_SET_PDEATHSIG, ForkServer, prctl, take_place
from rlhf_workers.fork_server import PRELOADED as OF_WORKERS
from rlhf_workers.fork_server import main as serve

PRELOADED: Final = ("rlhf_cli.main", "rlhf_cli.run", "rlhf_coordinator.reports.run_figures")
"""Modules that `rlhf run` itself imports."""


class RunServer(ForkServer):
    """Forks runs."""

    def _serve_as(self, order: dict[str, Any]) -> int:
        from rlhf_cli import main
        from rlhf_cli.local.fork_client import ForkServerClient

        sys.path[0] = str(Path.cwd())
        sys.argv = ["rlhf", *order["arguments"]]
        waiting = ForkedServer()
        executed = ForkServerClient._begin

        async def begin(client: ForkServerClient, process: Any, log: Path) -> Any:
            if waiting.taken:
                return await executed(client, process, log)
            return await waiting.take({**os.environ, **process.env, **client._token}, process.folder, log)

        setattr(ForkServerClient, "_begin", begin)  # noqa: B010 mypy takes no other method in its place
        try:
            main.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


class ForkedServer:
    """A waiting fork server: a child of the run with the part of asyncio's Process interface that is used."""

    def __init__(self) -> None:
        """Fork it. The calling process must have a single thread."""
        requests, orders = os.pipe()
        answers, replies = os.pipe()
        runner = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(orders)
            os.close(answers)
            _be_a_fork_server(runner, requests, replies)
        os.close(requests)
        os.close(replies)
        self._orders, self._answers = orders, answers
        self.taken = False
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None

    async def take(self, environment: dict[str, str], folder: Path, log: Path) -> "ForkedServer":
        """Start serving in a given environment, folder and log; return this object."""
        self.taken = True
        place = {"name": "python", "environment": environment, "folder": str(folder), "log": str(log), "cores": None}
        os.write(self._orders, json.dumps(place).encode() + b"\n")
        loop = asyncio.get_running_loop()
        self.stdout = asyncio.StreamReader()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.stdout or asyncio.StreamReader()), os.fdopen(self._answers, "rb")
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(self._orders, "wb")
        )
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        return self

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError."""
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        if self.returncode is None:
            _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _be_a_fork_server(runner: int, requests: int, replies: int) -> None:
    """Wait for a place, then serve until the end. Never return."""
    code = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        place = b""
        while os.getppid() == runner and not place.endswith(b"\n") and (more := os.read(requests, 1 << 16)):
            place += more
        if place:
            take_place(json.loads(place))
            sys.path[0] = str(Path.cwd())
            ForkServer(requests, replies).serve()
            code = 0
    os._exit(code)


def main() -> None:
    """Serve runs on the standard streams."""
    serve(RunServer, (*OF_WORKERS, *PRELOADED))


if __name__ == "__main__":
    main()
