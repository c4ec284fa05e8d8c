"""Where a process listens: one socket for both families of addresses, where every address is meant.

Rule: the wildcard of either family, `[::]` and `0.0.0.0`, means every address, as gRPC takes it; a cluster whose pods
have IPv6 alone, IPv4 alone or both is served by the same command line. A kernel without IPv6 gets IPv4.
"""

import socket
from typing import Final

WILDCARDS: Final = frozenset({"", "::", "0.0.0.0"})  # noqa: S104 pods listen on every address


def listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError when the address cannot be bound."""
    if host in WILDCARDS:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((str(address[0]), port), family=family)
