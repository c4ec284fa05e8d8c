"""Puts a container under memory pressure, so that the kernel kills its largest process, as it does above a limit.

Rule: the container may keep its present memory, and a process that joins it asks for more. Control groups of version 1
accept no limit below the current use, and those of version 2 would kill a process at once for one; both accept this.
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
"""Joins a control group and takes 256 MB unless it is killed."""


def exhaust(node: str, container: str) -> None:
    """Return when the kernel has killed a process. `node`: name of the control group above a node's containers."""
    first = (leftovers.CGROUPS / "memory").is_dir()
    top = leftovers.CGROUPS / ("memory" if first else "") / node
    limit, used = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    group = next(top.rglob(container), None)
    if group is None:
        raise ClusterError(f"container {container} has no control group below {top}")
    before = _processes(group)
    for _ in range(ASKED):  # the page cache of files is freed first
        _set_to(group / f"memory.{limit}", group / f"memory.{used}")
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may search long for memory to reclaim
            subprocess.run([sys.executable, "-c", ASK, str(group / "cgroup.procs")], timeout=ASK_SECONDS, check=False)
        if not before <= _processes(group):
            return
    raise ClusterError(f"nothing of {container} was ended, though it asked for more memory {ASKED} times")


def _processes(group: Path) -> set[str]:
    """Return the ids of the processes in a control group; empty if it is gone."""
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
