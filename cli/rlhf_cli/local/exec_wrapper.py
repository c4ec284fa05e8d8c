"""Started between the runner and a process of the job: ties its life to the runner's, pins it, then becomes it.

Run as a script by `python -I -S`: `launch.py <runner pid> <cores, comma separated, or -> <command> ...`.
Rule: standard library only, a few milliseconds. It exists because the same work between fork and exec in a runner with
gRPC threads can deadlock. When the runner dies, the kernel kills the process: a killed `rlhf run` leaves none behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when the thread that made it ends; kept across exec."""


def wrapper_command(cores: "frozenset[int] | None") -> tuple[str, ...]:
    """What to put before a command so that it starts through here, as a child of this process."""
    wanted = ",".join(map(str, sorted(cores))) if cores else "-"
    return sys.executable, "-I", "-S", __file__, str(os.getpid()), wanted


def main(arguments: list[str]) -> None:
    """Never returns: becomes the command, or exits."""
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
