"""Free loopback ports for the processes of a local run.

Rule: ports are taken from below the kernel's ephemeral range. A port inside it may be given to somebody's outgoing
connection while our process restarts, and a client that redials it may even connect to itself.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from rlhf_api.names import ExitCode
from rlhf_cli.local.errors import RunError

LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 10_000
"""Below are ports that well-known services use."""


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def free_ports(random: Random) -> Iterator[int]:
    """Distinct free ports, in random order so that two runs on one machine seldom meet."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(_LOWEST, max(first_ephemeral, _LOWEST + 10_000)))
    random.shuffle(candidates)
    yield from filter(is_free, candidates)
    raise RunError(
        f"no free port between {candidates and min(candidates)} and {max(candidates)}", ExitCode.ADDRESS_IN_USE
    )


def claim(port: int) -> int:
    """The port a user asked for. Raises RunError when it is none, or (exit code 24) when somebody listens on it."""
    if not 1 <= port <= 65535:
        raise RunError(f"--port {port}: must be from 1 to 65535")
    if not is_free(port):
        raise RunError(
            f"--port {port}: the address {LOOPBACK}:{port} is in use; choose another port, or leave --port out",
            ExitCode.ADDRESS_IN_USE,
        )
    return port
