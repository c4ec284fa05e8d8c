"""Assigns the ports of a job on this machine.

Rule: a port was free when it was assigned. A process has the same ports over its restarts: `HeldPorts` reserves them,
except a port that the user requested. When the runner dies, the kernel frees the reservations.
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
"""Lowest port to assign; below are those of well-known services."""


@dataclass(frozen=True)
class ProcessPorts:
    """The ports of one process."""

    listen: int
    """Port of the gRPC server."""
    metrics: int
    """Port of metrics and liveness."""
    rendezvous: int | None = None
    """Port of the store at which training ranks meet; None for a process outside the group with the ranks."""


@dataclass(frozen=True)
class PodPorts:
    """The ports of a pod of several ranks, which is one process that starts them."""

    metrics: int
    """Port of metrics and liveness of all ranks."""
    ranks: tuple[ProcessPorts, ...]
    """Ports of each rank."""


class JobPorts:
    """Assigns the ports of one job's processes, each port once."""

    def __init__(self, candidates: Iterator[int], coordinator: int | None = None) -> None:
        """`candidates` are free ports; `coordinator` is the port that the user requested, None for any."""
        self._candidates = candidates
        self._taken: set[int] = set()
        self.coordinator = self._take() if coordinator is None else coordinator
        """Port at which the coordinator listens."""
        self._taken.add(self.coordinator)

    def of_coordinator(self) -> ProcessPorts:
        """Return the ports of the coordinator."""
        return ProcessPorts(self.coordinator, self._take())

    def of_worker(self, *, is_rank: bool) -> ProcessPorts:
        """Return the ports of a worker. `is_rank`: whether it also gets one for the rendezvous of ranks."""
        return ProcessPorts(self._take(), self._take(), self._take() if is_rank else None)

    def of_ranks(self, count: int) -> PodPorts:
        """Return the ports of `count` ranks in one pod."""
        return PodPorts(self._take(), tuple(self.of_worker(is_rank=True) for _ in range(count)))

    def _take(self) -> int:
        port = next(port for port in self._candidates if port not in self._taken)
        self._taken.add(port)
        return port


class HeldPorts:
    """Ports reserved by bound sockets that do not listen. A context manager; its end frees the ports."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def take(self, port: int) -> bool:
        """Reserve this port of the loopback interface; return False when it is in use, or was a moment ago."""
        holder = socket.socket()
        try:
            holder.bind((LOOPBACK, port))
            # Set after the exclusive bind, which proved the port free; now servers may listen beside this socket.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            return False
        self._sockets.append(holder)
        return True


def is_free(port: int) -> bool:
    """Return whether a server could now listen on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def free_ports(random: Random, take: Callable[[int], bool] = is_free) -> Iterator[int]:
    """Yield distinct free ports in random order. `take` says whether a port is free, and may reserve it. Raises
    RunError (exit code 24) when none is left.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(_LOWEST, max(first_ephemeral, _LOWEST + 10_000)))
    random.shuffle(candidates)
    yield from filter(take, candidates)
    raise RunError(f"no free port between {min(candidates)} and {max(candidates)}", ExitCode.ADDRESS_IN_USE)


def claim(port: int) -> int:
    """Return the port that a user requested. Raises RunError when it is invalid, or (exit code 24) in use."""
    if not 1 <= port <= 65535:
        raise RunError(f"--port {port}: must be from 1 to 65535")
    if not is_free(port):
        raise RunError(
            f"--port {port}: the address {LOOPBACK}:{port} is in use; choose another port, or leave --port out",
            ExitCode.ADDRESS_IN_USE,
        )
    return port
