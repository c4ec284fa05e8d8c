"""Takes a container's memory away, so that the kernel ends what has most in it, as it does above a limit.

The rule: the container may keep what it has, and a process that joins it asks for more. Control groups of version 1
take no limit below what is in use, and those of version 2 would end a process at once for one; both take this.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import leftovers
from tests.cluster.processes import ClusterError

TRIES = 200
PAUSE_SECONDS = 0.05
ASK_SECONDS = 60.0
ASKED = 8
ASK = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
kept = [b"x" * (1 << 20) for _ in range(256)]
"""
"""Joins a control group and takes 256 MB, if nobody ends it: less than any worker has."""


def exhaust(node: str, container: str) -> None:
    """`node`: name of the control group that a node's containers are below. Returns when the kernel has ended one."""
    first = (leftovers.CGROUPS / "memory").is_dir()
    top = leftovers.CGROUPS / ("memory" if first else "") / node
    limit, used = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    group = next(top.rglob(container), None)
    if group is None:
        raise ClusterError(f"container {container} has no control group below {top}")
    before = _processes(group)
    for _ in range(ASKED):  # what files have in memory goes first
        _set_to(group / f"memory.{limit}", group / f"memory.{used}")
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may look long for what it can take away
            subprocess.run([sys.executable, "-c", ASK, str(group / "cgroup.procs")], timeout=ASK_SECONDS, check=False)
        if not before <= _processes(group):
            return
    raise ClusterError(f"nothing of {container} was ended, though it asked for more memory {ASKED} times")


def _processes(group: Path) -> set[str]:
    """Ids of what is in a control group; none when it is gone."""
    try:
        return set((group / "cgroup.procs").read_text().split())
    except OSError:
        return set()


def _set_to(limit: Path, used: Path) -> None:
    for _ in range(TRIES):
        try:
            limit.write_text(used.read_text())
        except OSError:  # more is in use by now
            time.sleep(PAUSE_SECONDS)
        else:
            return
    raise ClusterError(f"{used} grows from look to look")
