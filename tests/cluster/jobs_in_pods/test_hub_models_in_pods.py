"""A job by hub id in pods of a real node: coordinator and workers download the model, and one without it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.jobs_in_pods.tiny_job import condition, tiny_job
from tests.cluster.jobs_in_pods.undisturbed import Undisturbed
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.support.jobs.chaos import digest
from tests.support.model_folders.model_hub import ModelHub, model_hub

pytestmark = pytest.mark.full

HUB_ID = "team/tiny"
SIZE: dict[str, Any] = {"algorithm": "grpo", "iterations": 2, "batch": 8, "responses": 8}
PATIENCE = 600.0
"""Seconds for a job."""


@pytest.fixture
def hub(node_cluster: Cluster) -> Iterator[ModelHub]:
    """Yield a hub at the host's address in the pods' network."""
    with model_hub(str(urlsplit(node_cluster.server).hostname)) as served:
        yield served


def job_by_hub_id(cluster: Cluster, namespace: str, folder: Path, hub: ModelHub) -> dict[str, Any]:
    """Return the tiny job with its actor by hub id, downloaded from `hub` into each pod's own cache."""
    job = tiny_job(cluster, namespace, folder, **SIZE)
    job["spec"]["models"]["actor"]["path"] = HUB_ID
    variables = [{"name": "HF_ENDPOINT", "value": hub.address}, {"name": "HF_HOME", "value": "/tmp/hub"}]
    for group in ("generation", "inference", "training"):
        [container] = job["spec"][group]["template"]["spec"]["containers"]
        container["env"] = variables
    return job


def test_a_job_in_pods_trains_the_hubs_model(
    node_cluster: Cluster, operator: OperatorProcess, hub: ModelHub, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    with Undisturbed(tmp_path / "local", **SIZE) as local:
        job = job_by_hub_id(node_cluster, "hub-model", folder, hub)
        hub.models[HUB_ID] = folder / "policy"
        node_cluster.apply(job)
        until(node_cluster, operator, "hub-model", "Complete")
        assert digest(folder / "checkpoints") == local.weights()


def test_an_id_that_the_hub_lacks_fails_the_job_with_the_remedy(
    node_cluster: Cluster, operator: OperatorProcess, hub: ModelHub, tmp_path: Path
) -> None:
    job = job_by_hub_id(node_cluster, "no-hub-model", tmp_path / "job", hub)
    hub.models["team/other"] = tmp_path / "job" / "policy"
    node_cluster.apply(job)
    failed = until(node_cluster, operator, "no-hub-model", "Failed")
    assert HUB_ID in failed["message"]
    assert "let pods of the job reach the hub" in failed["message"]


def until(cluster: Cluster, operator: OperatorProcess, namespace: str, kind: str) -> dict[str, Any]:
    """Wait until a condition of the job is true; return it."""
    seen: dict[str, Any] = {}

    def holds() -> bool:
        seen.update(condition(cluster.get("rlhfjob", "tiny", f"--namespace={namespace}"), kind))
        return seen.get("status") == "True"

    wait_until(f"{kind} of the job in {namespace}", holds, PATIENCE, check=operator.check, every=0.5)
    return seen
