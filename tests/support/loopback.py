"""Loopback addresses of each family that this kernel has, for tests that must hold for IPv4 and IPv6, and free ports.

Rule: a port that a test chooses before somebody listens there is one that nobody else takes until then: none that the
kernel gives to outgoing connections, not while a server is away for its restart either, none of those from which
`rlhf run` and the test cluster choose, none of another process of this test run, and none twice.
"""

import os
import socket
from collections.abc import Iterator
from random import Random
from typing import Final

from rlhf_cli.local.ports import is_free

LOOPBACKS: Final = ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",)
_PORTS: Final = range(4_000, 10_000)
"""Below those of `rlhf run` (from 10,000) and of the test cluster (from 21,000)."""


def bracketed(host: str) -> str:
    """`host` as it stands in an address or a URL."""
    return f"[{host}]" if ":" in host else host


def _ports_of_this_process() -> Iterator[int]:
    """Every n-th port, where n processes run tests, from anywhere on: another test run begins elsewhere."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _PORTS[number::count]
    start = Random().randrange(len(own))
    while True:
        yield from own[start:]
        yield from own[:start]


_ports: Final = _ports_of_this_process()


def free_port() -> int:
    """A port nobody listens at."""
    return next(filter(is_free, _ports))


def free_address() -> str:
    """A loopback address nobody listens at."""
    return f"127.0.0.1:{free_port()}"
