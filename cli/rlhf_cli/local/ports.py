"""Ports of a job on this machine: the one place that hands them out.

Rule: no port is handed out twice for a job, and every port is free when it is handed out. Ports are taken from below
the kernel's ephemeral range, because one inside it may be given to anybody's outgoing connection while our process
restarts, and a client that redials it may even connect to itself. A process keeps its ports over all its restarts, and
`HeldPorts` keeps all but one that the user asked for meanwhile: no other run takes it while its process starts, or is
started anew. When the runner dies, the kernel gives back what is held, and each process keeps what it listens at.
"""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Self

from rlhf_cli.local.errors import RunError
from rlhf_common.names import ExitCode

LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 10_000
"""Ports below are those of well-known services."""


@dataclass(frozen=True)
class ProcessPorts:
    """The ports of one process."""

    listen: int
    """gRPC server: the coordinator's service, or a worker's for its peers, which fetch weights and move KV caches."""
    metrics: int
    """Metrics and liveness."""
    rendezvous: int | None = None
    """Store at which the training ranks meet; None for a process that is no rank."""


@dataclass(frozen=True)
class PodPorts:
    """The ports of a pod of several ranks, which is one process that starts them."""

    metrics: int
    """Metrics and liveness of all of them."""
    ranks: tuple[ProcessPorts, ...]
    """Of each."""


class JobPorts:
    """Hands out the ports of one job's processes, each port once."""

    def __init__(self, candidates: Iterator[int], coordinator: int | None = None) -> None:
        """`candidates` are free ports; `coordinator` is the port the user asked for, None for any."""
        self._candidates = candidates
        self._taken: set[int] = set()
        self.coordinator = self._take() if coordinator is None else coordinator
        """Port at which the coordinator listens."""
        self._taken.add(self.coordinator)

    def of_coordinator(self) -> ProcessPorts:
        """Return the ports of the coordinator."""
        return ProcessPorts(self.coordinator, self._take())

    def of_worker(self, *, is_rank: bool) -> ProcessPorts:
        """Return the ports of a worker; a training rank also gets one for the rendezvous."""
        return ProcessPorts(self._take(), self._take(), self._take() if is_rank else None)

    def of_ranks(self, count: int) -> PodPorts:
        """Return the ports of so many ranks in one pod."""
        return PodPorts(self._take(), tuple(self.of_worker(is_rank=True) for _ in range(count)))

    def _take(self) -> int:
        port = next(port for port in self._candidates if port not in self._taken)
        self._taken.add(port)
        return port


class HeldPorts:
    """Ports at which only who shares addresses may listen, as our servers do. A context manager; its end frees them.

    A socket that is bound and does not listen keeps a port from all who bind exclusively, as another run does to ask.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def take(self, port: int) -> bool:
        """Hold this port of the loopback interface; False when somebody has it, or had it a moment ago."""
        holder = socket.socket()
        try:
            holder.bind((LOOPBACK, port))
            # Only now: so nobody else held it, and servers may listen beside this socket.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            return False
        self._sockets.append(holder)
        return True


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def free_ports(random: Random, take: Callable[[int], bool] = is_free) -> Iterator[int]:
    """Yield distinct free ports in random order; `take` says whether one is free, and may hold it.

    Raises RunError with exit code 24 when there is none left.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(_LOWEST, max(first_ephemeral, _LOWEST + 10_000)))
    random.shuffle(candidates)
    yield from filter(take, candidates)
    raise RunError(f"no free port between {min(candidates)} and {max(candidates)}", ExitCode.ADDRESS_IN_USE)


def claim(port: int) -> int:
    """Return the port a user asked for. Raises RunError when it is none, or (exit code 24) when it is in use."""
    if not 1 <= port <= 65535:
        raise RunError(f"--port {port}: must be from 1 to 65535")
    if not is_free(port):
        raise RunError(
            f"--port {port}: the address {LOOPBACK}:{port} is in use; choose another port, or leave --port out",
            ExitCode.ADDRESS_IN_USE,
        )
    return port
