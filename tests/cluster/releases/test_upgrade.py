"""An operator with other images takes over the jobs of its predecessor: running jobs continue, new ones use the images.

Pods run on fake nodes; fields that the API server adds to a pod are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.operating.job_fixture import ALL, Seen, manifest
from tests.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.full


REGISTRY = "registry.example.com"


def images(version: str) -> tuple[str, str]:
    """Return the arguments of an operator with images of a version."""
    return f"--coordinator-image={REGISTRY}/operator:{version}", f"--worker-image={REGISTRY}/worker:{version}"


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator before its upgrade."""
    with OperatorProcess(cluster, *images("old")) as process:
        yield process


def versions(seen: Seen) -> dict[str, str]:
    """Return pod -> tag of its image."""
    return {name: pod["spec"]["containers"][0]["image"].rpartition(":")[2] for name, pod in seen.pods().items()}


def lose(seen: Seen, *workers: str) -> None:
    """Delete pods, and wait for their replacements."""
    before = seen.uids()
    seen.cluster.kubectl("delete", *(f"pod/job-{worker}" for worker in workers), seen.where)
    seen.until(
        "others in their place",
        lambda: all(seen.uids().get(worker, before[worker]) != before[worker] for worker in workers),
    )
    seen.until("them to run", lambda: set(workers) <= set(seen.running()))


def test_a_job_keeps_its_images_until_it_is_suspended_and_resumed(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    before, data = seen.uids(), cluster.get("configmap", "job-job", seen.where)["data"]
    operator.upgrade(*images("new"))
    cluster.apply(manifest(namespace, "other"))
    seen.until("a new job", lambda: len(seen.pods("other")) == len(ALL))
    assert seen.uids() == before
    assert cluster.get("configmap", "job-job", seen.where)["data"] == data
    lose(seen, "coordinator", "generation-1")
    seen.patch(generation={"replicas": 3})
    seen.until_pods(*ALL, "generation-2")
    assert set(versions(seen).values()) == {"old"}
    assert seen.job()["status"]["revision"]["workerImage"] == f"{REGISTRY}/worker:old"
    assert {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in seen.pods("other").values()} == {"new"}
    seen.patch(suspend=True)
    seen.until("Suspended", lambda: seen.condition("Suspended").get("status") == "True")
    seen.patch(suspend=False)
    seen.until_pods(*ALL, "generation-2")
    assert set(versions(seen).values()) == {"new"}
