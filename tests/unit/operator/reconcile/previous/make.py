"""Writes the objects that the operator of a checkout makes for a running job, as the cluster then holds them.

`objects.yaml` beside this file was made with commit a1b51f4, the last before jobs were pinned to what they run by:

    git worktree add /tmp/before a1b51f4
    PYTHONPATH=/tmp/before:/tmp/before/crds:/tmp/before/planner:/tmp/before/operator \
        python tests/unit/operator/reconcile/previous/make.py > tests/unit/operator/reconcile/previous/objects.yaml
"""

import json
import sys
from typing import Any

import yaml
from tests.support.queued_cluster import QueuedCluster

from rlhf_api.structural_schema import job_schema, with_defaults

IMAGES = {name: f"ghcr.io/rlhf-operator/{name}:latest" for name in ("operator", "worker")}
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


def objects() -> dict[str, Any]:
    """A job with a queue, a template, settings of its own and an edit in its life, while it trains."""
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "template": FILES}
    cluster = QueuedCluster(generation={"replicas": 2, "template": TEMPLATE}, training=training, iterations=50)
    cluster.job = with_defaults(cluster.job, job_schema())
    cluster.settle()
    cluster.admit()
    cluster.begin()
    cluster.job["spec"]["fusion"]["interStage"]["mode"] = "Disabled"
    cluster.job["metadata"]["generation"] = 2
    for _ in range(4):
        cluster.settle()
        cluster.finish_deletions()
    cluster.run()
    cluster.later(11)
    cluster.read()
    cluster.settle()
    assert len(cluster.pods) == 6, cluster.workers
    bodies = {"/".join(place): body for place, body in cluster.bodies.items()}
    workload = {"status": cluster.status, "flavors": {"h200": {"nodeSelector": {"gpu": "h200"}}}}
    return {"job": cluster.job, "objects": bodies, "pods": cluster.pods, "workload": workload}


if __name__ == "__main__":
    text = json.dumps(objects())
    for name, image in IMAGES.items():
        text = text.replace(image, f"example.org/{name}:1")
    yaml.safe_dump(json.loads(text), sys.stdout, sort_keys=True, width=120)
