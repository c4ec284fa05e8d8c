"""A job that runs while its operator is upgraded."""

import json
from typing import Any

from tests.support.operator.queued_cluster import QueuedCluster
from tests.support.operator.simulated_cluster import CONFIG_MAP, IMAGES, SimulatedCluster

from rlhf_api.structural_schema import job_schema, with_defaults

Json = dict[str, Any]

TEMPLATE = {
    "metadata": {"labels": {"team": "rl"}},
    "spec": {
        "containers": [
            {
                "name": "worker",
                "image": "registry.example.com/ours:7",
                "env": [{"name": "OURS", "value": "1"}],
                "resources": {"limits": {"memory": "3Gi"}},
            }
        ]
    },
}
FILES = {
    "spec": {
        "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": "files"}}],
        "containers": [{"name": "worker", "volumeMounts": [{"name": "files", "mountPath": "/checkpoints"}]}],
    }
}


def started() -> QueuedCluster:
    """Return a job that this version has started, in a queue, with its own template and settings."""
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "template": FILES}
    cluster = QueuedCluster(generation={"replicas": 2, "template": TEMPLATE}, training=training, iterations=50)
    cluster.job = with_defaults(cluster.job, job_schema())
    cluster.images = IMAGES
    cluster.settle()
    cluster.admit()
    cluster.begin()
    return cluster


def uids(cluster: SimulatedCluster) -> dict[str, str]:
    return {name: body["metadata"]["uid"] for name, body in cluster.pods.items()}


def container(cluster: SimulatedCluster, worker: str) -> Json:
    [own] = [item for item in cluster.pods[cluster.name(worker)]["spec"]["containers"] if item["name"] == "worker"]
    return dict(own)


def document(cluster: SimulatedCluster) -> Json:
    result: Json = json.loads(cluster.bodies[CONFIG_MAP]["data"]["job.json"])
    return result


def edit(cluster: SimulatedCluster, **spec: Any) -> None:
    cluster.job["spec"] |= spec
    cluster.job["metadata"]["generation"] += 1


def settle(cluster: SimulatedCluster, rounds: int = 6) -> None:
    """Alternate reconciles and kubelets until nothing changes."""
    for _ in range(rounds):
        cluster.later(11)
        cluster.read()
        cluster.settle()
        if not cluster.finish_deletions():
            cluster.run()
            cluster.later(11)
            cluster.read()
            cluster.settle()
