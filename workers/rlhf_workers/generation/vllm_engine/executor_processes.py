"""vLLM's executor processes on a worker that has several: detects ended ones, and ends them with the worker.

A process is set to die with the thread that started it, even while it waits in a collective. The module also removes
the names of the group's shared memory, which must be open in all processes. Must never touch shared memory of other
engines: names contain the group's identity.
"""

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 the kernel's place for it, not a temporary file
IDENTITY: Final = "VLLM_DIST_IDENT"
"""Variable of an executor process with the prefix of its group's shared memory names."""
_PR_SET_PDEATHSIG: Final = 1


class ExecutorProcess(Protocol):
    """A process with the attributes of `multiprocessing.Process`."""

    name: str

    @property
    def pid(self) -> int | None:
        """Return its id; None before it started."""

    @property
    def exitcode(self) -> int | None:
        """Return its exit code, negative for a signal; None while it lives."""


def ended_processes(processes: Iterable[ExecutorProcess]) -> str:
    """Return which processes ended and how, as text, unexpected ends first; empty if all live."""
    ended = [(process.exitcode, process) for process in processes if process.exitcode is not None]
    ended.sort(key=lambda item: item[0] in (0, -signal.SIGTERM))
    return ", ".join(f"{process.name} (pid {process.pid}) ended with {_how(code)}" for code, process in ended)


def bind_to_worker() -> None:
    """Make this executor process die with the thread that started it, and remove its shared memory names."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    remove_names(os.environ.get(IDENTITY, ""), SHARED_MEMORY)


def remove_names(identity: str, folder: Path) -> None:
    """Remove the names of a group's shared memory; processes that opened it keep it."""
    if not identity:
        return
    for path in folder.iterdir():
        if path.name.startswith(f"{identity}-"):
            path.unlink(missing_ok=True)  # another process of the group may be faster


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
