"""NetworkPolicies enforced on a real node, by the Kubernetes project's own kube-network-policies.

Owns its command line and the packet rules that queue packets for it. Rule: the first packet of every connection through
the node is judged, and none passes while the process does not run. An accepted connection stays even if policies
change later. The project's own nftables rules need a kernel with nft's queue expression and labels by netlink, which
many lack. These iptables rules are equivalent; with both in force a packet is judged twice. Rules and process are in
the node's namespaces and end with it.
"""

from __future__ import annotations

from pathlib import Path

NAME = "kube-network-policies"
QUEUE = 100  # number of the netfilter queue, in the node's own network namespace

RULES = (
    ("--out-interface", "lo", "--jump", "RETURN"),
    # Packets of the node's root: the kubelet's probes, which every network plugin allows.
    ("--match", "owner", "--uid-owner", "0", "--jump", "RETURN"),
    ("--match", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "--jump", "RETURN"),
    ("--jump", "NFQUEUE", "--queue-num", str(QUEUE)),
)


def rules() -> list[list[str]]:
    """Return commands that queue packets after the rules of services, so with addresses of pods, and before
    masquerading."""
    return [["iptables", "--wait", "--table", "mangle", "--append", "POSTROUTING", *rule] for rule in RULES]


def arguments(kubeconfig: Path, node: str) -> list[str]:
    """Return the arguments of the process on `node`."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node}",
        f"--nfqueue-id={QUEUE}",
        "--fail-open=false",
        "--disable-nri",  # Debian's containerd has none; pods are identified by their status
        "--netfilter-bug-1766-fix=false",  # for DNS on kernels before 6.12
        "--metrics-bind-address=127.0.0.1:9080",
    ]
