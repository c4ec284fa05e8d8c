"""A process that listens on a wildcard address is reachable over IPv4 and IPv6, for either wildcard."""

import socket

import pytest
from tests.support.loopback import LOOPBACKS

from rlhf_common.endpoint import listener


def reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("wildcard", ["::", "0.0.0.0", ""])
def test_every_address_is_that_of_both_families(wildcard: str) -> None:
    with listener(wildcard, 0) as listening:
        assert all(reached(host, listening.getsockname()[1]) for host in LOOPBACKS)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_one_address_is_that_alone(host: str) -> None:
    with listener(host, 0) as listening:
        port = listening.getsockname()[1]
        assert [item for item in LOOPBACKS if reached(item, port)] == [host]


def test_a_kernel_without_ipv6_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listener("::", 0) as result:
        assert result.family is socket.AF_INET
        assert reached("127.0.0.1", result.getsockname()[1])


def test_a_taken_port_is_refused() -> None:
    with listener("::", 0) as first, pytest.raises(OSError, match="Address already in use"):
        listener("0.0.0.0", first.getsockname()[1])
