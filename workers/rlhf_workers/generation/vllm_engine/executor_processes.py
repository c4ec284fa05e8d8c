"""vLLM's executor processes, where a worker has several GPUs: which have ended, and that none outlives its worker.

vLLM ends them when its own process closes a pipe, which one that waits in a collective or a kernel does not notice;
and the memory that its kernels for CPU share has names that nobody removes. So each is told to die with the thread that
started it, and the names go once all have opened them.
Rule: with one process there is nothing to do, as that is the worker. Must never touch what another engine's processes
share: names carry the group's own identity.
"""

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 the kernel's place for it, not a temporary file
IDENTITY: Final = "VLLM_DIST_IDENT"
"""Variable in an executor process: how the names of what its group shares begin."""
_PR_SET_PDEATHSIG: Final = 1


class ExecutorProcess(Protocol):
    """A process as `multiprocessing` has it."""

    name: str

    @property
    def pid(self) -> int | None:
        """Return its id; None before it started."""

    @property
    def exitcode(self) -> int | None:
        """Return how it ended, negative for a signal; None while it lives."""


def ended_processes(processes: Iterable[ExecutorProcess]) -> str:
    """Return which processes have ended and how, in words, those first that nobody asked to; empty when all live."""
    ended = [(process.exitcode, process) for process in processes if process.exitcode is not None]
    ended.sort(key=lambda item: item[0] in (0, -signal.SIGTERM))
    return ", ".join(f"{process.name} (pid {process.pid}) ended with {_how(code)}" for code, process in ended)


def bind_to_worker() -> None:
    """In an executor process: die when the thread ends that started it, and leave no names of shared memory behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    remove_names(os.environ.get(IDENTITY, ""), SHARED_MEMORY)


def remove_names(identity: str, folder: Path) -> None:
    """Remove the names of the memory that a group shares; whoever has opened it keeps it."""
    if not identity:
        return
    for path in folder.iterdir():
        if path.name.startswith(f"{identity}-"):
            path.unlink(missing_ok=True)  # another of the group may be faster


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
