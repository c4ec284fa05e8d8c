"""The bridge between host and nodes, and the cluster's DNS server on it.

Owns the host's side of the network of level `node`. Rule: no setting of the host changes and no iptables rule is added
there; routes end with the bridge.
"""

from __future__ import annotations

import socket

from tests.cluster.control_plane import ControlPlane
from tests.cluster.node import run
from tests.cluster.processes import Processes, wait_until
from tests.cluster.slots import Slot
from tests.cluster.toolchain import binary

DNS_TIMEOUT = 240.0  # seconds until CoreDNS has listed services and pods and listens

COREFILE = """\
.:53 {{
    bind {host}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig} test
        pods insecure
        ttl 0
    }}
}}
"""


def make_bridge(slot: Slot) -> None:
    """Create the bridge with the host's address on it."""
    addresses = slot.addresses
    slot.record(link=addresses.bridge)
    run(["ip", "link", "add", addresses.bridge, "type", "bridge"])
    run(["ip", "address", "add", f"{addresses.host}/{addresses.links.prefixlen}", "dev", addresses.bridge])
    run(["ip", "link", "set", addresses.bridge, "up"])


def route_services(slot: Slot) -> None:
    """Let the host reach service addresses, through kube-proxy of the first node."""
    addresses = slot.addresses
    run(["ip", "route", "add", str(addresses.services), "via", addresses.node(0), "dev", addresses.bridge])


def start_dns(slot: Slot, control_plane: ControlPlane, processes: Processes) -> None:
    """Start CoreDNS on the bridge and wait until it accepts connections."""
    kubeconfig = control_plane.kubeconfig("coredns", "coredns", "system:masters")
    path = slot.folder / "Corefile"
    path.write_text(COREFILE.format(host=slot.addresses.host, kubeconfig=kubeconfig))
    processes.start("coredns", [binary("coredns"), "-conf", path])
    wait_until("CoreDNS", lambda: _listens(slot.addresses.host), DNS_TIMEOUT, check=processes.check)


def _listens(host: str) -> bool:
    try:
        socket.create_connection((host, 53), timeout=1).close()
    except OSError:
        return False
    return True
