"""The owner's side of a supervisor: named processes with their logs, requested over the supervisor's pipes.

Owns the pipes and the supervisor process. Rule: the host's pids are in the state file as soon as they are known. When
this process dies the pipes close and the supervisor ends its children (see supervisor.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.leftovers import start_time
from tests.cluster.slots import Slot

LOG_TAIL = 25  # lines of a log shown in an error: enough for a Go start-up failure, few enough to read
STOP_GRACE = 10.0  # seconds from SIGTERM to SIGKILL


class ClusterError(RuntimeError):
    """The cluster cannot carry out a request; the message says which and why."""


class Processes:
    """The processes under one supervisor; `prefix` runs before the supervisor and may move it into namespaces."""

    def __init__(
        self, slot: Slot, logs: Path, *, prefix: Sequence[str] = (), name: str = "supervisor", recorded: bool = True
    ) -> None:
        self._slot = slot
        self._logs = logs
        self._recorded = recorded
        self._asking = threading.Lock()
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
        with (logs / f"{name}.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                [*prefix, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self._record(self.supervisor.pid)
        if "ready" not in self._read(name):
            raise ClusterError(f"{name} did not start\n{tail(logs / f'{name}.log')}")

    def start(self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> int:
        """Start `argv` as `name`; return its pid in the supervisor's PID namespace."""
        self._commands[name] = ([str(word) for word in argv], dict(env or {}))
        return self._launch(name)

    def restart(self, name: str, *, grace: float = STOP_GRACE) -> int:
        """Stop `name` if it runs and start it with the same command."""
        self.stop(name, grace=grace)
        return self._launch(name)

    def stop(self, name: str, *, grace: float = STOP_GRACE) -> int:
        """End `name`: SIGTERM, then SIGKILL after `grace` seconds. Return its exit code, negative for a signal."""
        return int(self._ask(op="stop", name=name, grace=grace)["code"])

    def signal(self, name: str, number: int) -> None:
        """Send a signal, for instance SIGSTOP to freeze a component."""
        self._ask(op="signal", name=name, number=number)

    def check(self) -> None:
        """Raise ClusterError if a process has ended by itself."""
        for name, code in self._ask(op="status")["codes"].items():
            if code is not None:
                raise ClusterError(f"{name} ended with code {code}\n{tail(self.log(name))}")

    def log(self, name: str) -> Path:
        """Return the log file of `name`."""
        return self._logs / f"{name}.log"

    def end(self) -> None:
        """Kill everything under the supervisor at once and wait for it."""
        if self.supervisor.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.supervisor.stdin.close()
        try:
            self.supervisor.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        if self.supervisor.stdout:
            self.supervisor.stdout.close()

    def _launch(self, name: str) -> int:
        argv, env = self._commands[name]
        pid = int(self._ask(op="start", name=name, argv=argv, log=str(self.log(name)), env=env)["pid"])
        if self._recorded:
            self._record(pid)
        return pid

    def _record(self, pid: int) -> None:
        started = start_time(pid)
        if started is not None:
            self._slot.record(process=(pid, started))

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.supervisor.stdin is not None
        with self._asking:
            try:
                self.supervisor.stdin.write(json.dumps(request).encode() + b"\n")
                self.supervisor.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise ClusterError(
                    f"the supervisor is gone, cannot {request['op']} {request.get('name', '')}"
                ) from error
            answer = self._read(str(request.get("name", "supervisor")))
        if "error" in answer:
            raise ClusterError(f"{request['op']} {request.get('name', '')}: {answer['error']}")
        return answer

    def _read(self, name: str) -> dict[str, Any]:
        assert self.supervisor.stdout is not None
        line = self.supervisor.stdout.readline()
        if not line:
            raise ClusterError(
                f"the supervisor ended while it was asked about {name}\n{tail(self._logs / 'supervisor.log')}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def tail(path: Path, lines: int = LOG_TAIL) -> str:
    """Return the last lines of a log, headed by its path."""
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else ["(no log)"]
    return "\n".join([f"--- {path}", *text])


def wait_until(
    event: str,
    probe: Callable[[], object],
    timeout: float,
    *,
    check: Callable[[], None] = lambda: None,
    every: float = 0.1,
) -> None:
    """Call `probe` until it returns a true value; `check` may raise to give up early.

    Raises TimeoutError naming `event` after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not probe():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {event}")
        time.sleep(every)
