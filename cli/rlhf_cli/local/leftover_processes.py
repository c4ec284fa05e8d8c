"""Find and end leftover processes of a run, such as children of a killed worker.

Rule: a process belongs to the run if its environment has the run's token. One whose environment cannot be read is left
alone.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

TOKEN_VARIABLE: Final = "RLHF_RUN_TOKEN"  # noqa: S105 the name of the variable, not a secret
"""Environment variable of every process of a local run; its value is new for every run folder."""
GONE_SECONDS: Final = 5.0
"""Seconds that a killed process may take to disappear."""


def find_processes(token: str) -> list[int]:
    """Return the ids of living processes with the token, except this one."""
    entry = f"{TOKEN_VARIABLE}={token}".encode()
    process_ids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            # Exact match of one entry: the file is NUL-separated.
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                process_ids.append(int(folder.name))
    return process_ids


def kill_processes(token: str) -> list[int]:
    """Kill every process with the token, wait up to GONE_SECONDS for their end, and return the ids that were found
    first.
    """
    killed = living = find_processes(token)
    deadline = time.monotonic() + GONE_SECONDS
    while living and time.monotonic() < deadline:
        for process_id in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.01)
        living = find_processes(token)
    return killed
