"""Starts the workers of one machine by forking, so torch is imported once and not per process.

`python -m rlhf_workers.fork_server` reads one JSON object per line from standard input (`name`, `environment`,
`folder`, `log`, `cores` or null) and forks a worker for each. On standard output it writes `{"ready": true}` once,
`{"pid": ...}` for each fork, and `{"ended": pid, "code": ...}` for each exit (negative: the signal).

Rule: the process has one thread, because a lock that another thread holds stays locked in the child. Must never serve
processes with an accelerator: CUDA does not survive a fork. When the server ends, the kernel kills its workers.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from rlhf_common.names import Env

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
"""Options of prctl(2)."""
PRELOADED: Final = (
    "torch",
    "rlhf_workers.agent",
    "rlhf_workers.algorithms.cispo",
    "rlhf_workers.algorithms.dapo",
    "rlhf_workers.algorithms.grpo",
    "rlhf_workers.algorithms.gspo",
    "rlhf_workers.algorithms.ppo",
    "rlhf_workers.algorithms.reinforce_plus_plus",
    "rlhf_workers.algorithms.remax",
    "rlhf_workers.algorithms.rloo",
    "rlhf_workers.algorithms.safe_rlhf",
    "rlhf_workers.algorithms.sft",
    "rlhf_workers.algorithms.dpo",
    "rlhf_workers.algorithms.reward_model",
    "rlhf_workers.generation.generation_role",
    "rlhf_workers.generation.torch_engine.build",
    "rlhf_workers.inference.inference_role",
    "rlhf_workers.inference.rewards.function",
    "rlhf_workers.inference.rewards.model",
    "rlhf_workers.training.backends.torch_backend",
    "rlhf_workers.training.training_role",
)
"""Modules imported before the first fork; a worker imports others itself."""
LINES_AT_ONCE: Final = 1 << 16
"""Maximum bytes per read."""


class ForkServer:
    """Forks workers and waits for them to end, on one thread."""

    def __init__(self, requests: int, replies: int) -> None:
        """Take the file descriptors of the two pipes."""
        self._requests, self._replies = requests, replies
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._children: dict[int, int] = {}
        self._pending = b""

    def serve(self) -> None:
        """Serve until the input ends."""
        self._say({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._requests:
                    self._reap(key.fd)
                elif not self._read():
                    return

    def _read(self) -> bool:
        more = os.read(self._requests, LINES_AT_ONCE)
        *lines, self._pending = (self._pending + more).split(b"\n")
        for line in filter(None, lines):
            self._start(json.loads(line))
        return bool(more)

    def _serve_as(self, order: dict[str, Any]) -> int:
        """Run the worker in the child, once its environment is set up; return its exit code."""
        del order
        from rlhf_workers.__main__ import main

        return main()

    def _start(self, order: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, server)
        watched = os.pidfd_open(pid)
        self._children[watched] = pid
        self._selector.register(watched, selectors.EVENT_READ)
        self._say({"pid": pid})

    def _reap(self, watched: int) -> None:
        pid = self._children.pop(watched)
        self._selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        self._say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, reply: dict[str, Any]) -> None:
        os.write(self._replies, json.dumps(reply).encode() + b"\n")

    def _become(self, order: dict[str, Any], server: int) -> NoReturn:
        """Run the child: tie its life to the server's, set up its environment, and be a worker until it ends."""
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._selector.close()
            for inherited in (self._requests, self._replies, *self._children):
                os.close(inherited)
            take_place(order)
            code = self._serve_as(order)
            sys.stdout.flush()
            os._exit(code)
        except BaseException as error:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"{order.get('name')} cannot be started: {error!r}\n")
                sys.stderr.flush()
            os._exit(1)


def take_place(order: dict[str, Any]) -> None:
    """Apply the folder, environment, log, cores and title of an order to this process."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    if order["cores"] is not None:
        os.sched_setaffinity(0, order["cores"])
    prctl(PR_SET_NAME, order["name"].encode()[:15])


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2); raise OSError when the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def preload(modules: Sequence[str]) -> None:
    """Import the modules a child may need; raise SystemExit if that started threads."""
    from importlib import import_module

    from rlhf_workers.loading import uncollected

    with uncollected():
        for module in modules:
            import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"cannot fork: importing {', '.join(modules)} started {threads - 1} threads")


def main(server: type[ForkServer] = ForkServer, modules: Sequence[str] = PRELOADED) -> None:
    """Serve on the standard streams; output of libraries goes to standard error."""
    replies = os.dup(1)
    os.dup2(2, 1)
    requests = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for inherited in (requests, replies):
        os.set_inheritable(inherited, False)
    # As `__main__` does in a worker that is not forked.
    os.environ["OMP_NUM_THREADS"] = os.environ.get(Env.THREADS, "1")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    preload(modules)
    server(requests, replies).serve()


if __name__ == "__main__":
    main()
