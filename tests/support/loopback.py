"""Loopback addresses of each family that this kernel has, for tests of IPv4 and IPv6, and free ports.

Rule: the kernel's default range of outgoing connections does not contain a chosen port, so a server can restart on it.
`rlhf run`, the test cluster and other processes of this test run do not choose it.
"""

import os
import socket
from collections.abc import Iterator
from random import Random
from typing import Final

from rlhf_cli.local.ports import is_free

LOOPBACKS: Final = ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",)
_PORTS: Final = range(4_000, 10_000)
"""Ports below those of `rlhf run` (from 10,000) and of the test cluster (from 21,000)."""


def bracketed(host: str) -> str:
    """Return `host` as written in an address or a URL."""
    return f"[{host}]" if ":" in host else host


def _ports_of_this_process() -> Iterator[int]:
    """Yield every n-th port for n test processes, from a random start, so that another test run starts elsewhere."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _PORTS[number::count]
    start = Random().randrange(len(own))
    while True:
        yield from own[start:]
        yield from own[:start]


_ports: Final = _ports_of_this_process()


def free_port() -> int:
    """Return a port on which no process listens."""
    return next(filter(is_free, _ports))


def free_address() -> str:
    """Return a loopback address on which no process listens."""
    return f"127.0.0.1:{free_port()}"
