"""One coordinator per journal: the folder's lock (flock), which ends with its process.

A file server may revoke the lock from a silent node, so its owner writes a name into the file, and `JournalLock.check`
ends a process that finds another name. A volume without locks is used without one, with a warning.
"""

import errno
import fcntl
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError, storage_error

log = logging.getLogger("coordinator")

LOCK_FILE: Final = "coordinator.lock"
PATIENCE_SECONDS: Final = 360.0
"""Longest wait for the lock in seconds."""
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to get the lock."""
WATCH_SECONDS: Final = 5.0
"""Seconds between two periodic checks of the owner."""
UNKNOWN: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a volume without locks."""
ONE_NODE: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs"})
"""File systems that count as used by one node at a time."""
SHARED: Final = frozenset({"nfs", "nfs4", "ceph", "lustre", "gpfs", "ocfs2", "gfs2"})
"""File systems of several nodes that count as sharing a flock, unless a mount option says otherwise."""
LOCAL_OPTIONS: Final = frozenset({"nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock"})
"""Mount options that make a lock local to the node, or disable it."""
MOUNTS: Final = Path("/proc/self/mountinfo")
_FIELD: Final = "RLHF_RUN_DIR"


@dataclass(frozen=True)
class JournalLock:
    """The lock of a journal that this process owns."""

    path: Path
    descriptor: int
    name: str
    """Name of this process in the file; empty when the volume has no locks."""
    doubt: str = ""
    """Reason why another node might not see the lock; empty without one."""

    @property
    def ours(self) -> bool:
        """Whether the file still has this process's name, or the volume has no locks. Raises JobError.

        The file is opened again each time.
        """
        if not self.name:
            return True
        try:
            return self.path.read_text() == self.name
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("the journal", self.path.parent, error, _FIELD) from error

    def check(self, end: Callable[[int], NoReturn] = os._exit) -> None:
        """End the process when another one owns the lock. Raises JobError when the file cannot be read."""
        if self.ours:
            return
        log.error(
            "JournalTaken: %s now has another coordinator's name; this coordinator was cut off and ends", self.path
        )
        logging.shutdown()
        end(int(ExitCode.RESTART))

    def close(self) -> None:
        """Release the lock; the end of the process does the same."""
        os.close(self.descriptor)


def hold(
    folder: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> JournalLock:
    """Wait until no other process has the journal in `folder`, and return its lock.

    On a volume without locks, return at once. Raises JobError when the other process does not end (exit code 75), or
    the disk fails (23).
    """
    path, warned = folder / LOCK_FILE, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error("the journal", folder, error, _FIELD) from error
    deadline = clock() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return JournalLock(path, descriptor, _sign(folder, descriptor), doubt_of(folder))
        except BlockingIOError:
            if not warned:
                log.warning("waits for the previous coordinator, which still holds %s", path)
            warned = True
        except OSError as error:
            if error.errno not in UNKNOWN:
                os.close(descriptor)
                raise storage_error("the journal", folder, error, _FIELD) from error
            log.warning("%s does not support locks (%s): never run two coordinators of this job at once", folder, error)
            return JournalLock(
                path, descriptor, "", f"the volume of {folder} does not support locks ({error.strerror})"
            )
        if clock() > deadline:
            os.close(descriptor)
            message = f"waited {PATIENCE_SECONDS:.0f} s for another coordinator of this job to end: it holds {path}"
            raise JobError("JournalInUse", message, field=_FIELD, exit_code=ExitCode.RESTART)
        sleep(RETRY_SECONDS)


def doubt_of(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return why another node with the volume of `folder` might not see a lock in it; empty without a reason."""
    try:
        mount = _mount_of(folder.resolve(), mounts.read_text())
    except OSError as error:
        return f"{mounts} cannot be read: {error.strerror}"
    if mount is None:
        return f"{mounts} names no volume of {folder}"
    kind, options = mount
    if kind in ONE_NODE:
        return ""
    if kind not in SHARED:
        return f"{folder} is on {kind}, whose locks other nodes may not see"
    if local := sorted(LOCAL_OPTIONS & options):
        return f"{folder} is on {kind} mounted with {local[0]}, so its locks are this node's own"
    if kind == "lustre" and "flock" not in options:
        return f"{folder} is on lustre mounted without flock"
    return ""


def _mount_of(folder: Path, text: str) -> tuple[str, frozenset[str]] | None:
    """Return (type, options) of the last mount of the longest path above `folder`; see proc_pid_mountinfo(5)."""
    longest, mount = -1, None
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4]))
        if folder.is_relative_to(place) and len(place.parts) >= longest:
            longest, mount = len(place.parts), (rest[0], frozenset(f"{fields[5]},{rest[2]}".split(",")))
    return mount


def _sign(folder: Path, descriptor: int) -> str:
    """Write a new name of this process into the lock's file; return it. Raises JobError."""
    name = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}\n"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name.encode(), 0)
        os.fsync(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise storage_error("the journal", folder, error, _FIELD) from error
    return name
