"""A script that starts a process of the job: it ties the process to the life of the runner, pins it, and execs it.

`python -I -S exec_wrapper.py <pid of the runner> <cores, comma separated, or -> <command> ...`. When the runner dies,
the kernel kills the process, but not its children.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent thread dies; exec keeps the setting."""


def wrapper_command(cores: "frozenset[int] | None") -> tuple[str, ...]:
    """Return the prefix of a command with which this script starts it as a child of this process."""
    listed = ",".join(map(str, sorted(cores))) if cores else "-"
    return sys.executable, "-I", "-S", __file__, str(os.getpid()), listed


def main(arguments: list[str]) -> None:
    """Exec the command, or exit with a message; never return."""
    runner, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != runner:
        sys.exit("the runner is gone")
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)  # noqa: S606 the command comes from our own manifest
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
