"""Starts `rlhf run` for a test, either forked from a process with all imports or executed.

Rule: a run is forked only if it does not differ from one that a shell starts (`run_server`). The forking process must
have started with the same environment, because libraries read theirs when they are imported. A place is an environment
and a folder. The first place gets such a process at once, every other from its second run on: one run is executed at
the same cost. A run is also executed if a test asks for it, and always outside pytest, because benchmarks measure what
people type. Must never outlive pytest.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

OF_A_TEST: Final = "PYTEST_CURRENT_TEST"
"""Variable that pytest sets and that differs in every test; no run reads it."""

MOST_SERVERS: Final = 3
"""Number of forking processes; each has all libraries in memory as long as pytest runs."""

Place = tuple[str, dict[str, str]]
"""(folder, environment) of a run."""


class ForkedRun:
    """A forked `rlhf run` with the part of Popen's interface that tests use."""

    def __init__(self, server: "RunServerClient", pid: int) -> None:
        """`server`: the client of the process that forked it."""
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._process = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises TimeoutExpired after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("rlhf run", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        """Kill it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._process], [], [], seconds)[0]:
            self.returncode = self._server.code(self.pid)
            os.close(self._process)
        return self.returncode


class RunServerClient:
    """Client of the process that forks runs."""

    def __init__(self) -> None:
        """Start the process, in this environment and folder."""
        self.place = place()
        self._lock = Lock()
        self._codes: dict[int, int] = {}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.jobs.run_server", "rlhf_workers.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[3],
        )
        atexit.register(self.close)
        self._said()

    def start(self, arguments: Sequence[str], log: Path) -> ForkedRun:
        """Fork a run that prints into a log."""
        order = {"name": "rlhf", "environment": dict(os.environ), "folder": str(Path.cwd()), "log": str(log.absolute())}
        with self._lock:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(order | {"cores": None, "arguments": list(arguments)}).encode() + b"\n")
            self._server.stdin.flush()
            while "pid" not in (said := self._said()):
                pass
            return ForkedRun(self, said["pid"])

    def code(self, pid: int) -> int:
        """Return the exit code of a run that has ended."""
        with self._lock:
            while pid not in self._codes:
                self._said()
            return self._codes.pop(pid)

    def close(self) -> None:
        """End the process and its runs."""
        self._server.kill()
        self._server.wait()

    def _said(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that runs are forked of has died"
        said: dict[str, Any] = json.loads(line)
        if "ended" in said:
            self._codes[said["ended"]] = said["code"]
        return said


def place() -> Place:
    """Return what a child inherits from this process: its folder and environment."""
    return str(Path.cwd()), {name: value for name, value in os.environ.items() if name != OF_A_TEST}


class RunServers:
    """The processes that fork runs, one per place."""

    def __init__(self) -> None:
        """Start without processes."""
        self._servers: list[RunServerClient] = []
        self._seen: list[Place] = []

    def of_this_place(self) -> RunServerClient | None:
        """Return the process of this place; None if a run is to be executed."""
        wanted = place()
        for server in self._servers:
            if server.place == wanted:
                return server
        if self._servers and (wanted not in self._seen or len(self._servers) == MOST_SERVERS):
            self._seen.append(wanted)
            return None
        self._servers.append(RunServerClient())
        return self._servers[-1]


_servers: Final = RunServers()


def start_run(arguments: Sequence[str], log: Path, *, executed: bool) -> "subprocess.Popen[bytes] | ForkedRun":
    """Start `rlhf` with arguments; its output goes to a new log."""
    log.unlink(missing_ok=True)
    if not executed and OF_A_TEST in os.environ:
        server = _servers.of_this_place()
        if server is not None:
            return server.start(arguments, log)
    command = [sys.executable, "-m", "rlhf_cli.main", *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
