"""Fake nodes for scale: kwok answers for them, so that pods bound to them become Running without a container.

Owns kwok's command line and the object of a fake node. Rule: every fake node is tainted, so that no pod without a
toleration is scheduled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import Processes
from tests.cluster.slots import Slot
from tests.cluster.toolchain import binary, kwok_stages

KWOK_PORT = 3  # port of the slot, by index
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
TOLERATION = {"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"}
# Without an explicit file kwok reads one from the user's home.
CONFIGURATION = {
    "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
    "kind": "KwokConfiguration",
    "options": {
        "podPlayStageParallelism": 16,
        "nodePlayStageParallelism": 16,
        "nodeLeaseParallelism": 4,
        "podsOnNodeSyncParallelism": 4,
        "enablePodsOnNodeSyncStreamWatch": True,
    },
}
ANNOTATION = "kwok.x-k8s.io/node"


def start(slot: Slot, control_plane: ControlPlane, processes: Processes, extra: Sequence[str]) -> None:
    """Start kwok; it manages nodes with the annotation and ignores all others."""
    kubeconfig = control_plane.kubeconfig("kwok", "kwok", "system:masters")
    path = slot.folder / "kwok.yaml"
    path.write_text(yaml.safe_dump(CONFIGURATION))
    argv = [
        *(f"--config={item}" for item in (path, *kwok_stages())),
        f"--kubeconfig={kubeconfig}",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        f"--server-address=127.0.0.1:{slot.addresses.port(KWOK_PORT)}",
        "--node-lease-duration-seconds=40",
        *extra,
    ]
    processes.start("kwok", [binary("kwok"), *argv])


def node(index: int, *, gpus: int) -> dict[str, Any]:
    """Return the object of fake node `index`."""
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "256"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    name = f"kwok-{index}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok"},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": amounts, "capacity": amounts},
    }
