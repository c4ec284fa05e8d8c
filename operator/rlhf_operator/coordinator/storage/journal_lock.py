"""One coordinator a journal: the folder's lock, held until the process ends.

A pod that is deleted by force is gone from the API server at once, while its coordinator still saves its last
checkpoint; the next one must not write the same journal meanwhile, so it waits. Rule: the lock is the kernel's (flock),
so it goes with its process however that dies, on this machine, on a volume of the node, and over NFS. A volume that
knows no locks is used without one, and a warning says so.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlhf_operator.coordinator.failures import JobError, storage_error

log = logging.getLogger("coordinator")

LOCK_FILE: Final = "coordinator.lock"
PATIENCE_SECONDS: Final = 360.0
"""The 300 s of grace that a coordinator's pod has for its last checkpoint, and a minute."""
LOOK_SECONDS: Final = 0.5
UNKNOWN: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a volume without locks says."""
_FIELD: Final = "RLHF_RUN_DIR"


def hold(folder: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> int:
    """Waits until no other process has the journal in `folder`; returns the descriptor that holds it from now on.

    Raises JobError when the other one does not end (exit code 1: it is worth another try) or the disk refuses (23).
    """
    path, told = folder / LOCK_FILE, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error("the journal", folder, error, _FIELD) from error
    deadline = clock() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if not told:
                log.warning("waits for the coordinator before it, which still has %s", path)
            told = True
        except OSError as error:
            if error.errno not in UNKNOWN:
                os.close(descriptor)
                raise storage_error("the journal", folder, error, _FIELD) from error
            log.warning("%s knows no locks (%s): never run two coordinators of this job at once", folder, error)
            return descriptor
        if clock() > deadline:
            os.close(descriptor)
            message = f"waited {PATIENCE_SECONDS:.0f} s for another coordinator of this job to end: it holds {path}"
            raise JobError("JournalInUse", message, field=_FIELD)
        sleep(LOOK_SECONDS)
