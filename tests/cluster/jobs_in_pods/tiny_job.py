"""The tiny deterministic job as an RLHFJob in a namespace, trained by this machine's Python in pods of a real node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.cluster import environment
from tests.cluster.cluster import Cluster
from tests.support.jobs import local_job


def tiny_job(cluster: Cluster, name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the tiny job in namespace `name`, with its files in `folder`; the caller applies it."""
    job: dict[str, Any] = yaml.safe_load(local_job.write_job(folder, **more).read_text())
    spec = job["spec"]
    job["metadata"] = {"name": "tiny", "namespace": name}
    for model in ("actor", "critic"):
        if model in spec["models"]:
            spec["models"][model]["path"] = str(folder / "policy")
    spec["models"]["reward"]["function"]["file"] = str(folder / "reward.py")
    spec["prompts"]["path"] = str(folder / "prompts.jsonl")
    in_pods(cluster, job, folder)
    return job


def in_pods(cluster: Cluster, job: dict[str, Any], folder: Path) -> None:
    """Mount `folder`, with the policy and the checkpoints, and this machine's Python into a job's pods; create its
    namespace.

    The caller applies it.
    """
    spec, namespace = job["spec"], job["metadata"]["namespace"]
    spec["checkpoints"] = {"path": str(folder / "checkpoints"), "every": 4}
    (folder / "checkpoints").mkdir()
    for item in (folder, folder / "checkpoints"):
        item.chmod(0o777)
    for item in (folder / "policy").iterdir():
        item.chmod(0o644)  # safetensors writes 0600, and pods run as another user
    code, data = environment.folders(), {"data": folder}
    cluster.add_namespace(namespace, {"pod-security.kubernetes.io/enforce": "restricted"})
    cluster.apply([*environment.volumes(code, namespace), *environment.volumes(data, namespace, writable=True)])
    volumes, mounts = environment.pod_spec(code)
    more_volumes, more_mounts = environment.pod_spec(data, writable=True)
    container = {
        "name": "worker",
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        "volumeMounts": mounts + more_mounts,
    }
    for group in ("generation", "inference", "training"):
        spec[group]["template"] = {"spec": {"containers": [container], "volumes": volumes + more_volumes}}


def condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of a job; empty if it does not exist yet."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})
