"""Pods of a real node that start late, not at all, or end late: the messages for the user, and the job's recovery.

The kubelet's messages and times are real here: init containers, images, containers beside a worker that ignore SIGTERM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.fixture import own_cluster
from tests.cluster.jobs_in_pods.tiny_job import tiny_job
from tests.cluster.operating.job_fixture import ROOT, Seen
from tests.cluster.operator_process import OperatorProcess, beside_node

pytestmark = pytest.mark.full


PATIENCE = 600.0  # seconds for a job of six processes to train an iteration
STUBBORN = "trap '' TERM; while :; do sleep 1; done"
"""A command that ignores SIGTERM."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a cluster with one real node."""
    with own_cluster(request, level="node") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator beside it."""
    with beside_node(cluster) as process:
        yield process


def small(namespace: str, **pod_spec: Any) -> dict[str, Any]:
    """Return a job whose generation pods have this pod spec; none of its workers starts to work here."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ppo.yaml").read_text())
    job["metadata"] = {"name": "job", "namespace": namespace}
    del job["spec"]["checkpoints"]
    few = {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}]}
    template = {"spec": few | pod_spec}
    job["spec"] |= {
        "coordinator": {"template": {"spec": few}},
        "generation": {"replicas": 1, "template": template},
        "inference": {"replicas": 1, "template": {"spec": few}},
        "training": {"microBatchSize": 8, "template": {"spec": few}},
        "runPolicy": {"backoffLimit": 1000},
    }
    return job


def init(command: str) -> list[dict[str, Any]]:
    """Return an init container that runs a command."""
    return [{"name": "fetch", "image": images.MOUNTED, "command": ["sh", "-c", command]}]


def message(seen: Seen) -> str:
    """Return the message of the condition Running."""
    return str(seen.condition("Running")["message"])


def iteration(seen: Seen) -> int:
    """Return the present iteration of the job."""
    return int(seen.job().get("status", {}).get("progress", {}).get("iteration", 0))


def until_said(seen: Seen, *parts: str) -> None:
    """Wait until the condition Running contains all these texts."""
    seen.until(f"{parts}", lambda: all(part in message(seen) for part in parts), 60)


def test_an_init_container_that_runs_long_and_one_that_fails_are_named(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(small(namespace, initContainers=init("sleep 1000")))
    until_said(seen, "job-generation-0 waits for its init container fetch", "kubectl logs job-generation-0 -c fetch")
    containers = small(namespace)["spec"]["generation"]["template"]["spec"]["containers"]
    template = {"spec": {"containers": containers, "initContainers": init("echo no such bucket; exit 3")}}
    seen.patch(generation={"template": template})
    until_said(seen, "job-generation-0 cannot be started (Init:Error: fetch ended with exit code 3")


def test_a_command_that_cannot_be_run_is_told_in_the_runtimes_words(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(small(namespace))
    # The kubelet sets the start of a container that never ran to the beginning of 1970.
    until_said(seen, "executable file not found in $PATH")
    assert "cannot be read" not in message(seen)


def test_an_image_that_does_not_exist_is_named_with_its_field(cluster: Cluster, seen: Seen, namespace: str) -> None:
    worker = {"name": "worker", "image": "localhost/nosuch:1", "imagePullPolicy": "IfNotPresent"}
    cluster.apply(small(namespace, containers=[worker]))
    until_said(seen, "job-generation-0 cannot get the image", "correct the image in spec.generation.template")


def test_containers_that_outlive_their_worker_do_not_hold_up_a_suspension(
    cluster: Cluster, seen: Seen, tmp_path: Path, namespace: str
) -> None:
    job = tiny_job(cluster, namespace, tmp_path, iterations=100_000)
    sidecar = {"name": "mesh", "image": images.MOUNTED, "command": ["sh", "-c", STUBBORN]}
    job["spec"]["coordinator"] = {"template": {"spec": {"containers": [sidecar]}}}
    for group in ("generation", "training"):
        job["spec"][group]["template"]["spec"]["containers"].append(sidecar)
    job["metadata"]["name"] = "job"
    cluster.apply(job)
    seen.until("an iteration", lambda: iteration(seen) > 1, PATIENCE)
    before = seen.uids()
    began = time.monotonic()
    seen.patch(suspend=True)
    seen.until("Suspended", lambda: seen.condition("Suspended")["status"] == "True")
    seen.until("no pods", lambda: not seen.pods())
    assert time.monotonic() - began < 120, "the grace of a coordinator is 300 s"
    reached = iteration(seen)
    seen.patch(suspend=False)
    seen.until("an iteration more", lambda: iteration(seen) > reached, PATIENCE)
    assert not before.items() & seen.uids().items()
    seen.until_restarts(0, 0)


def test_a_quota_is_tried_ever_less_often_and_an_edit_at_once(cluster: Cluster, seen: Seen, namespace: str) -> None:
    def quota(pods: int) -> None:
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "team", "namespace": namespace},
                "spec": {"hard": {"pods": str(pods)}},
            }
        )

    quota(0)
    seen.until("the quota", lambda: cluster.get("resourcequota", "team", seen.where).get("status", {}).get("hard"))
    cluster.apply(small(namespace, initContainers=init("sleep 1000")))
    until_said(seen, "exceeded quota: team", "free quota in the namespace, or raise it")
    quota(10)
    seen.until("pods", seen.pods, 60)
    # Let a new job wait, so that its next attempt is a minute away.
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    seen.until("no pods", lambda: not seen.pods())
    quota(0)
    seen.until("the quota", lambda: cluster.get("resourcequota", "team", seen.where)["status"]["hard"]["pods"] == "0")
    cluster.apply(small(namespace, initContainers=init("sleep 1000")))
    until_said(seen, "exceeded quota: team")
    time.sleep(50)  # attempts after 15 and 30 s; the next one is after 60
    quota(10)
    seen.until("the quota", lambda: cluster.get("resourcequota", "team", seen.where)["status"]["hard"]["pods"] == "10")
    began = time.monotonic()
    seen.patch(generation={"template": {"metadata": {"labels": {"team": "a"}}}})
    seen.until("pods", seen.pods, 60)
    took = time.monotonic() - began
    assert took < 10
