"""The parent of a cluster's processes: starts and stops them on request, and ends them when its owner dies.

A separate program that needs only the standard library. It runs on the host for the control plane, and as process 1 of
a node's namespaces. Requests are JSON lines on stdin, with one JSON answer each on stdout. Its stdin is the lifeline:
the owner has the only write end, so when the owner dies, even by SIGKILL, end-of-file arrives and every child is
killed. Children also die with this process (PDEATHSIG, and the end of process 1 empties the PID namespace). It must
never outlive its owner nor leave a zombie.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Children by name; a name can be started again once its process has ended."""

    def __init__(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()

    def start(self, name: str, argv: list[str], log: str, env: dict[str, str]) -> dict[str, Any]:
        """Start `argv`; stdout and stderr are appended to `log`."""
        if name in self.children and self.children[name].poll() is None:
            return {"error": f"{name} runs already"}
        with Path(log).open("ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | env,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.children[name] = child
        self.stopped.discard(name)
        return {"pid": child.pid}

    def stop(self, name: str, grace: float) -> dict[str, Any]:
        """Send SIGTERM, then SIGKILL after `grace` seconds (0: SIGKILL at once). Return the exit code."""
        child = self.children.get(name)
        if child is None:
            return {"error": f"{name} was never started; running: {sorted(self.children)}"}
        if grace > 0 and child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace)
        if child.poll() is None:
            child.kill()
            child.wait()
        self.stopped.add(name)
        return {"code": child.returncode}

    def signal(self, name: str, number: int) -> dict[str, Any]:
        """Send one signal, SIGSTOP and SIGCONT included."""
        if name not in self.children:
            return {"error": f"{name} was never started; running: {sorted(self.children)}"}
        self.children[name].send_signal(number)
        return {}

    def status(self) -> dict[str, Any]:
        """Return exit codes by name, null while a process runs; without those that were stopped on request."""
        ours = ((name, child) for name, child in self.children.items() if name not in self.stopped)
        return {"codes": {name: child.poll() for name, child in ours}}

    def reap(self) -> None:
        """Collect orphans that process 1 has inherited; Popen collects our own children."""
        ours = {child.pid for child in self.children.values()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in ours:
                for child in self.children.values():
                    child.poll()
            else:
                os.waitpid(ended.si_pid, 0)

    def end(self) -> None:
        """Kill every child, dependants first, and wait until they are gone."""
        for child in reversed(self.children.values()):
            if child.poll() is None:
                child.kill()
        for child in self.children.values():
            child.wait()


def serve() -> None:
    """Answer requests until stdin closes."""
    supervisor = Supervisor()
    # Process 1 ignores signals without a handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    pending = b""
    try:
        while True:
            supervisor.reap()
            if not selector.select(timeout=1.0):
                continue
            chunk = os.read(sys.stdin.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                print(json.dumps(answer(supervisor, json.loads(line))), flush=True)
    finally:
        supervisor.end()


def answer(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request; an operating-system error is an answer, not the end of the supervisor."""
    operations: dict[str, Callable[..., dict[str, Any]]] = {
        "start": supervisor.start,
        "stop": supervisor.stop,
        "signal": supervisor.signal,
        "status": supervisor.status,
    }
    try:
        return operations[request.pop("op")](**request)
    except OSError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    serve()
