"""Loopback addresses of each family that this kernel has, for tests that must hold for IPv4 and IPv6."""

import socket
from typing import Final

LOOPBACKS: Final = ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",)


def bracketed(host: str) -> str:
    """`host` as it stands in an address or a URL."""
    return f"[{host}]" if ":" in host else host
