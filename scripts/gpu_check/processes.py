"""Runs a command with a time limit and ends all that it started, whatever it did to escape.

Rule: the runner adopts orphans (PR_SET_CHILD_SUBREAPER), so every process that a step started is among its descendants
until it is dead; nothing else is ever signalled.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1
LOG_BYTES_PER_STEP = 1 << 20
"""A step that prints without end must not fill the disk, and the log is to be read."""


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its children leave behind."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc: the process group alone is ended then
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_seconds: float,
    on_line: Callable[[str], None],
    on_poll: Callable[[], None],
) -> int | None:
    """Runs a command in a process group of its own; its exit status, or None when it was killed at its limit.

    `on_line` is called with each line that it prints, from another thread; `on_poll` now and then from this one.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, on_line), daemon=True)
    reader.start()
    end = time.monotonic() + limit_seconds
    try:
        while process.poll() is None and time.monotonic() < end:
            on_poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        status = process.poll()
    finally:
        end_descendants(process)
    reader.join(5)  # the pipe is closed once all are dead
    return status


def _read(stream: IO[bytes], on_line: Callable[[str], None]) -> None:
    left = LOG_BYTES_PER_STEP
    for line in stream:
        if left > 0:
            on_line(line.decode(errors="replace").rstrip("\n"))
        left -= len(line)


def end_descendants(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process, its group, and every process that descends from this one, until none is left."""
    for _ in range(50):  # each pass may reveal orphans of those just killed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        found = descendants(os.getpid())
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not found and process.poll() is not None:
            return
        time.sleep(0.1)


def descendants(root: int) -> list[int]:
    """Return the processes that descend from one, those already dead left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    queue = [root]
    while queue:
        born = children.get(queue.pop(), [])
        found += born
        queue += born
    return found
