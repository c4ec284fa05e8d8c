"""Removes what an instance created: at its own stop, or by the next run after a crash, from the state file alone.

Rule: a process is ended only if pid, start time and boot are the recorded ones; a link, control group or folder only by
a recorded name. Every step may be repeated. It must never follow a mount when it deletes a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.cluster.slots import SLOTS, Slot, State, boot_id, lock_path, slots_root, try_lock

CGROUPS = Path("/sys/fs/cgroup")
END_TIMEOUT = 120.0
"""Seconds until killed processes and their control groups must be gone; the kernel frees the memory of workers
first."""


class LeftoverError(RuntimeError):
    """A recorded resource of ours could not be removed; the message names it."""


def sweep(root: Path | None = None) -> list[int]:
    """Clean up every crashed instance of this user; return the cleaned slots."""
    root = root or slots_root()
    cleaned = []
    for number in range(SLOTS):
        if not (root / str(number)).exists() and not lock_path(root, number).exists():
            continue
        slot = try_lock(root, number)
        if slot is None:
            continue
        if slot.folder.exists():
            clean(slot)
            cleaned.append(number)
        slot.release()
    return cleaned


def clean(slot: Slot) -> None:
    """Remove everything that the slot's state file names, then its folder.

    Raises LeftoverError naming what stays; the state file stays too, for another attempt.
    """
    state = State.read(slot.state_file)
    if state is not None:
        if state.boot == boot_id():
            end_processes(state.processes)
        for link in state.links:
            delete_link(link)
        for cgroup in state.cgroups:
            delete_cgroup(cgroup)
    remove_folder(slot.folder)


def start_time(pid: int) -> int | None:
    """Return the start of process `pid` in clock ticks since boot (proc(5), field 22); None if it is missing or a
    zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def end_processes(processes: list[tuple[int, int]]) -> None:
    """Send SIGKILL to those that are still the recorded ones, and wait for their end."""
    deadline = time.monotonic() + END_TIMEOUT
    for pid, started in processes:
        if start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for pid, started in processes:
        while start_time(pid) == started:
            if time.monotonic() > deadline:
                raise LeftoverError(f"process {pid} outlived SIGKILL by {END_TIMEOUT:.0f} s")
            time.sleep(0.02)


def delete_link(name: str) -> None:
    """Delete one network link, if it exists."""
    if not Path(f"/sys/class/net/{name}").exists():
        return
    deleted = subprocess.run(["ip", "link", "delete", name], capture_output=True, text=True, check=False)
    if deleted.returncode and Path(f"/sys/class/net/{name}").exists():
        raise LeftoverError(f"ip link delete {name}: {deleted.stderr.strip()}")


def cgroup_hierarchies() -> list[Path]:
    """Return roots for control groups: one (version 2) or one per controller (version 1)."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if path.is_dir() and not path.is_symlink()]


def delete_cgroup(name: str) -> None:
    """Delete control group `name` and those below it in every hierarchy."""
    deadline = time.monotonic() + END_TIMEOUT
    for hierarchy in cgroup_hierarchies():
        top = hierarchy / name
        while top.exists():
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
            if top.exists():
                if time.monotonic() > deadline:
                    raise LeftoverError(f"control group {top} still holds processes")
                time.sleep(0.05)


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points in this process's mount namespace at or below `folder`."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


def remove_folder(folder: Path) -> None:
    """Delete `folder` and everything in it."""
    mounts = mounts_below(folder)
    if mounts:
        raise LeftoverError(f"{folder} has mounts in it, refusing to delete through them: {mounts}")
    if folder.exists():
        shutil.rmtree(folder)
