"""Fixtures for tests that watch an operator work on jobs whose pods run on fake nodes, and the user's view of them.

Rule: a module has one operator, and a test has its own namespace; fixtures do not know what a test expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.kwok import TAINT
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

ROOT = Path(__file__).parents[3]
TIMEOUT = 240.0  # seconds for anything here
LABEL = "rlhf.dev/job-name"
ALL = ["coordinator", "generation-0", "generation-1", "inference-0", "training-0", "training-1"]


@pytest.fixture(scope="session")
def cluster(control_plane_cluster: Cluster) -> Cluster:
    """Return the control plane with the definition, and fake nodes that accept any pod."""
    control_plane_cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
    # Separate names, because other tests depend on the taint of theirs.
    for name in control_plane_cluster.add_kwok_nodes(2, gpus=8, first=100):
        control_plane_cluster.kubectl("taint", "node", name, f"{TAINT['key']}-")
    return control_plane_cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator."""
    with OperatorProcess(cluster) as process:
        yield process


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield a namespace of the restricted Pod Security level."""
    name = "job-" + request.node.name.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    cluster.add_namespace(name, {"pod-security.kubernetes.io/enforce": "restricted"})
    yield name
    cluster.kubectl("delete", "rlhfjobs", "--all", f"--namespace={name}", "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


SHARED_FILES: dict[str, Any] = {
    "spec": {
        "volumes": [{"name": "files", "csi": {"driver": "files.example.org"}}],
        "containers": [{"name": "worker", "volumeMounts": [{"name": "files", "mountPath": "/checkpoints"}]}],
    }
}
"""Template with a volume for the checkpoints of ranks; no scheduler waits for the volume, no fake node mounts it."""


def manifest(namespace: str, name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a job of six pods without GPUs."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ppo.yaml").read_text())
    job["metadata"] = {"name": name, "namespace": namespace}
    job["spec"] |= {
        "generation": {"replicas": 2},
        "inference": {"replicas": 1},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "template": SHARED_FILES},
    }
    job["spec"] |= spec
    return job


class Seen:
    """The user's view of a namespace.

    The operator acts first, then writes the status, and then posts events: a test waits for each of them.
    """

    def __init__(self, cluster: Cluster, operator: OperatorProcess, namespace: str) -> None:
        self.cluster, self.operator, self.where = cluster, operator, f"--namespace={namespace}"

    def job(self, name: str = "job") -> dict[str, Any]:
        """Return the RLHFJob."""
        return self.cluster.get("rlhfjob", name, self.where)

    def condition(self, kind: str, name: str = "job") -> dict[str, Any]:
        """Return a condition of a job; one with empty fields if it does not exist."""
        conditions = self.job(name).get("status", {}).get("conditions", [])
        absent = dict.fromkeys(("status", "reason", "message"), "")
        return next((condition for condition in conditions if condition["type"] == kind), absent)

    def pods(self, name: str = "job") -> dict[str, dict[str, Any]]:
        """Return the pods with the label of a job, by their names without the job's."""
        pods = self.cluster.get("pods", self.where, f"--selector={LABEL}={name}")["items"]
        return {pod["metadata"]["name"].removeprefix(f"{name}-"): pod for pod in pods}

    def uids(self) -> dict[str, str]:
        """Return the uids of the job's pods."""
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def running(self) -> list[str]:
        """Return the names of the job's pods that are Running, sorted."""
        return sorted(name for name, pod in self.pods().items() if pod["status"].get("phase") == "Running")

    def until(self, event: str, holds: Any, timeout: float = TIMEOUT) -> None:
        """Wait for a fact; raise if the operator has ended."""
        wait_until(event, holds, timeout, every=0.3, check=self.operator.check)

    def until_pods(self, *expected: str) -> None:
        """Wait until exactly these pods run and the status is that of the present manifest."""
        self.until(f"pods {expected}", lambda: self.running() == sorted(expected))
        self.until("the status of this generation", self._observed)

    def until_gone(self, kind: str, name: str) -> None:
        """Wait until the object does not exist."""
        named = ("get", kind, name, self.where, "--ignore-not-found", "--output=name")
        self.until(f"{kind} {name} to be gone", lambda: not self.cluster.kubectl(*named).strip())

    def until_restarts(self, failures: int, disruptions: int) -> None:
        """Wait until the status has exactly these counts."""
        event = f"{failures} failures and {disruptions} disruptions to be counted"
        try:
            self.until(event, lambda: self.restarts() == (failures, disruptions))
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the status counts {self.job()['status'].get('restarts')}") from None

    def until_event(self, *reasons: str, name: str = "job") -> None:
        """Wait until a job has an event of each of these reasons."""
        self.until(f"events {reasons}", lambda: set(reasons) <= set(self.events(name)))

    def events(self, name: str = "job") -> list[str]:
        """Return the reasons of the events about a job."""
        events = self.cluster.get("events", self.where)["items"]
        return [event["reason"] for event in events if event["involvedObject"]["name"] == name]

    def restarts(self) -> tuple[int, int]:
        """Return (failures, disruptions) of the status; (-1, -1) while it has no counts."""
        counts = self.job().get("status", {}).get("restarts")
        return (counts["failures"], counts["disruptions"]) if counts else (-1, -1)

    def _observed(self) -> bool:
        job = self.job()
        return bool(job.get("status", {}).get("observedGeneration") == job["metadata"]["generation"])

    def patch(self, **spec: Any) -> None:
        """Change the spec like `kubectl edit`."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "rlhfjob", "job", self.where, "--type=merge", f"--patch={patch}")

    def report(self, worker: str, status: dict[str, Any]) -> None:
        """Write a pod's status as a kubelet would."""
        patch = json.dumps({"status": status})
        arguments = (self.where, "--subresource=status", "--type=merge", f"--patch={patch}")
        self.cluster.kubectl("patch", "pod", f"job-{worker}", *arguments)


@pytest.fixture
def seen(cluster: Cluster, operator: OperatorProcess, namespace: str) -> Seen:
    """Return the view of the test's namespace."""
    return Seen(cluster, operator, namespace)
