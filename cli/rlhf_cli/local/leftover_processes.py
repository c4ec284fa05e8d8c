"""Finds and ends processes of a run that nobody waits for any more, such as children of a worker that was killed.

Rule: a process belongs to the run if and only if its environment carries the run's token; it is ended by its id, never
by name. Only processes of this user can be read, so others are never touched.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

TOKEN_VARIABLE: Final = "RLHF_RUN_TOKEN"  # noqa: S105 the name of the variable, not a secret
"""Environment variable that every process of a local run carries; a new value for every run folder."""

GONE_SECONDS: Final = 5.0
"""Time a killed process may take to disappear; longer means the kernel holds it (a device, a network file system)."""


def find_processes(token: str) -> list[int]:
    """Ids of living processes that carry the token, this one excluded."""
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            # Exact match of one entry: the file is NUL-separated.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_processes(token: str) -> list[int]:
    """Ends every process that carries the token, and waits until they are gone; returns their ids."""
    killed = found = find_processes(token)
    deadline = time.monotonic() + GONE_SECONDS
    while found and time.monotonic() < deadline:
        for process_id in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.01)
        found = find_processes(token)
    return killed
