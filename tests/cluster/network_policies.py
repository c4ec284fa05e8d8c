"""NetworkPolicies enforced on a real node, by the Kubernetes project's own kube-network-policies.

Owns its command line and the packet rules that bring it work. The rule: the first packet of every connection through
the node is judged, and while nothing runs that could judge, none gets through; a connection that was let in stays,
whatever policies come later. Its own nftables rules need a kernel with nft's queue expression and labels by netlink,
which many lack; these say the same in iptables, and where both are in force a packet is judged twice. Rules and
process live in the node's namespaces and end with it.
"""

from __future__ import annotations

from pathlib import Path

NAME = "kube-network-policies"
QUEUE = 100  # number of the netfilter queue, in the node's own network namespace

RULES = (
    ("--out-interface", "lo", "--jump", "RETURN"),
    # What root of the node sends: the kubelet's probes, as every plugin lets them through.
    ("--match", "owner", "--uid-owner", "0", "--jump", "RETURN"),
    ("--match", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "--jump", "RETURN"),
    ("--jump", "NFQUEUE", "--queue-num", str(QUEUE)),
)


def rules() -> list[list[str]]:
    """Commands that queue packets where their addresses are those of pods: after a service's, before masquerading."""
    return [["iptables", "--wait", "--table", "mangle", "--append", "POSTROUTING", *rule] for rule in RULES]


def arguments(kubeconfig: Path, node: str) -> list[str]:
    """Of the process on `node`."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node}",
        f"--nfqueue-id={QUEUE}",
        "--fail-open=false",
        "--disable-nri",  # Debian's containerd has none; pods are known by their status
        "--netfilter-bug-1766-fix=false",  # for DNS on kernels before 6.12
        "--metrics-bind-address=127.0.0.1:9080",
    ]
