"""Objects that a tenant may write beside the jobs of others, on a real API server: operator and jobs continue."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.operating.job_fixture import ALL, LABEL, Seen, manifest

pytestmark = pytest.mark.full


LEVELS = 100
"""Levels of a template that the API server stores."""


def pod(name: str, namespace: str, **labels: str) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": namespace,
        "labels": {LABEL: "job"} | {f"rlhf.dev/{k}": labels[k] for k in labels},
    }
    secured = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "containers": [{"name": "worker", "image": "none", "securityContext": secured}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def nested(levels: int) -> Any:
    result: Any = {}
    for _ in range(levels):
        result = {"a": result}
    return result


def test_objects_that_cannot_be_read_cost_nobody_else_anything(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    pid, uid = seen.operator.pid, seen.job()["metadata"]["uid"]
    place = {"group": "generation", "index": "0", "epoch": "0"}
    strangers = [
        pod("abc", namespace, **place | {"epoch": "abc"}),
        pod("digits", namespace, **place | {"index": "9" * 40}),
        pod("imposter", namespace, **{"job-uid": uid, "group": "coordinator", "index": "0"}),
    ]
    cluster.apply(strangers)
    pods_before = {item["metadata"]["name"]: item for item in cluster.get("pods", seen.where)["items"]}
    deep = manifest(namespace, "deep")
    deep["spec"]["generation"]["template"] = nested(LEVELS)
    cluster.apply(deep)
    log = '{"report": {"iteration": "final", "metrics": [1]}}\n' + "[" * 2000
    ended = {"terminated": {"exitCode": 1, "message": log, "reason": "Error"}}
    state = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 1, "state": ended}
    seen.report("training-0", {"containerStatuses": [state]})
    cluster.kubectl("label", "pod", "job-generation-0", "rlhf.dev/epoch=abc", "--overwrite", seen.where)

    seen.until("the words", lambda: "Pod job-generation-0 cannot be read" in seen.condition("Running")["message"])
    seen.until_event("Unreadable")
    seen.until("the refusal", lambda: "levels deep" in seen.condition("Planned", "deep").get("message", ""))
    cluster.apply(manifest(namespace, "other"))
    seen.until("another job", lambda: len(seen.pods("other")) == len(ALL))
    for name in ("abc", "digits", "imposter"):
        now = cluster.get("pod", name, seen.where)["metadata"]
        assert (now["uid"], now["labels"]) == (
            pods_before[name]["metadata"]["uid"],
            pods_before[name]["metadata"]["labels"],
        )
    assert seen.operator.pid == pid
    seen.until(
        "Complete=False: an imposter's end is not the job's", lambda: seen.condition("Complete")["status"] == "False"
    )
