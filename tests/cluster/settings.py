"""The choices for a cluster.

Owns names, defaults and their checks; never touches the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from tests.cluster.slots import NODES_PER_SLOT

Level = Literal["api", "control-plane", "node"]
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kwok",
    "kubelet",
    "kube-proxy",
    "kube-network-policies",
)


@dataclass(frozen=True)
class ClusterSettings:
    """Choices for one cluster.

    Raises ValueError naming the field, and PermissionError if `level` needs root and there is none.
    """

    level: Level = "node"
    """api: etcd and API server. control-plane: also controllers and scheduler. node: also real nodes that run pods
    (root).
    """
    nodes: int = 1
    """Real nodes n1, n2, ...; each is a set of namespaces on this machine."""
    gpus: int = 8
    """nvidia.com/gpu advertised by each real node."""
    network_policies: bool = False
    """Whether real nodes enforce NetworkPolicies; those of a job block an operator that runs outside the cluster."""
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    """Feature gates of API server, controllers, scheduler and kubelet."""
    runtime_config: Sequence[str] = ()
    """API groups to serve besides the defaults, for instance scheduling.k8s.io/v1alpha2=true."""
    component_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Component -> further command-line arguments; a later flag wins over ours."""
    images: Sequence[Path] = ()
    """Image archives (OCI or docker) to import into every node."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(f"level: {self.level!r}: must be one of {', '.join(get_args(Level))}")
        if not 1 <= self.nodes <= NODES_PER_SLOT:
            raise ValueError(f"nodes: {self.nodes}: must be 1 to {NODES_PER_SLOT}")
        if self.gpus < 0:
            raise ValueError(f"gpus: {self.gpus}: must be at least 0")
        unknown = set(self.component_args) - set(COMPONENTS)
        if unknown:
            raise ValueError(f"component_args: {sorted(unknown)}: must be among {', '.join(COMPONENTS)}")
        if self.level == "node" and os.geteuid() != 0:
            raise PermissionError(
                "level 'node' makes namespaces, mounts and links and needs root; level 'control-plane' does not"
            )

    def gates(self) -> list[str]:
        """Return the feature-gate flag, or nothing."""
        pairs = ",".join(f"{name}={str(on).lower()}" for name, on in self.feature_gates.items())
        return [f"--feature-gates={pairs}"] if pairs else []

    def extra(self, component: str) -> list[str]:
        """Return further arguments of `component`."""
        return list(self.component_args.get(component, ()))
