"""Small pod manifests for tests, and waits on them.

Pure except for `wait`; a pod satisfies the restricted Pod Security level unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.cluster import images
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.processes import wait_until

POD_TIMEOUT = 240.0  # seconds for a small pod to start or end


def pod(name: str, command: Sequence[str], *, labels: Mapping[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a pod of one container of the Python image; `spec` extends the pod's; `resources`, `mounts` the
    container's.
    """
    resources, mounts = spec.pop("resources", None), spec.pop("mounts", None)
    container: dict[str, Any] = {
        "name": "main",
        "image": images.PYTHON,
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    if mounts:
        container["volumeMounts"] = mounts
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        }
        | spec,
    }


def python(name: str, program: str, **more: Any) -> dict[str, Any]:
    """Return a pod that runs a Python program and ends."""
    return pod(name, ["python3", "-c", program], **more)


def wait(
    cluster: Cluster, name: str, *phases: str, namespace: str = "default", timeout: float = POD_TIMEOUT
) -> dict[str, Any]:
    """Wait until pod `name` is in one of `phases`; return the pod.

    Raises ClusterError with kubectl describe if it does not get there, or with its log if it ends in another phase.
    """
    where = f"--namespace={namespace}"
    seen: dict[str, Any] = {}

    def arrived() -> bool:
        seen.update(cluster.get("pod", name, where))
        phase = seen["status"]["phase"]
        if phase in ("Succeeded", "Failed") and phase not in phases:
            raise ClusterError(f"pod {name} is {phase}, waited for {phases}\n{cluster.kubectl('logs', name, where)}")
        return phase in phases

    try:
        wait_until(f"pod {name} to be {' or '.join(phases)}", arrived, timeout, every=0.3)
    except TimeoutError as error:
        raise ClusterError(f"{error}\n{cluster.kubectl('describe', 'pod', name, where)}") from error
    return seen
