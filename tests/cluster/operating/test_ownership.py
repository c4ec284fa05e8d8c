"""Objects that do not belong to a job stay unchanged despite their names or labels, on a real API server.

Rule: every object that a test created beside a job is compared as a whole, before and after; its `resourceVersion`
proves that it was not written. The garbage collector is real too.
"""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.operating.job_fixture import ALL, LABEL, Seen, manifest

pytestmark = pytest.mark.full


RETRY_SECONDS = 15  # between two attempts at a refused write


def secret(namespace: str, name: str, **more: Any) -> dict[str, Any]:
    """Return a user's Secret."""
    meta = {"name": name, "namespace": namespace}
    data = {"ca.crt": base64.b64encode(b"mine").decode(), "ca.key": base64.b64encode(b"mine too").decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta | more, "data": data}


def of_others(namespace: str, job: str) -> list[dict[str, Any]]:
    """Return a user's objects with the names of a job's Secrets, ConfigMap, Services and NetworkPolicy."""

    def meta(name: str) -> dict[str, Any]:
        return {"name": name, "namespace": namespace, "labels": {"team": "storage"}}

    ports = [{"name": "db", "port": 5432}]
    return [
        secret(namespace, f"{job}-certificates"),
        secret(namespace, f"{job}-authority"),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(f"{job}-job"), "data": {"job.json": "{}"}},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta(job), "spec": {"ports": ports}},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta(f"{job}-coordinator"), "spec": {"ports": ports}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta(job),
            "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
        },
    ]


def refusals(seen: Seen) -> float:
    """Return how often the API server has reported that a name is taken, once the operator has this metric."""
    count = 0.0

    def counted() -> bool:
        nonlocal count
        count = seen.operator.metric("rlhf_operator_api_requests_total", code="409")
        return count > 0

    seen.until("refusals to be counted", counted)
    return count


def ready(seen: Seen) -> dict[str, int]:
    """Return group -> pods that are ready according to the status."""
    return {group["name"]: group["ready"] for group in seen.job()["status"]["groups"]}


def stored(cluster: Cluster, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return these objects as stored in the API server."""
    return [
        cluster.get(body["kind"].lower(), body["metadata"]["name"], f"--namespace={body['metadata']['namespace']}")
        for body in bodies
    ]


def test_objects_of_others_under_a_jobs_names_are_told_and_neither_changed_nor_taken_along(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    others = of_others(namespace, "wild")
    cluster.apply(others)
    before = stored(cluster, others)
    cluster.apply(manifest(namespace, "wild"))
    left = before

    message, gone = "", before

    def named() -> bool:
        """Return whether the objects are named, together with the message that names them."""
        nonlocal message, gone
        running = seen.condition("Running", "wild")
        message = running["message"] if running["reason"] == "NameTaken" else ""
        gone = [body for body in left if f"{body['kind']} {body['metadata']['name']}" in message]
        return bool(gone)

    while left:
        seen.until("an object to be named", named)
        assert "another name" in message
        assert not cluster.get("pods", seen.where)["items"], "no pod runs with what is not the job's"
        for entry in gone:
            resource = f"{entry['kind'].lower()}/{entry['metadata']['name']}"
            assert resource in message, "and how to remove it"
            assert stored(cluster, [entry]) == [entry]
            cluster.kubectl("delete", resource, seen.where)
        left = [item for item in left if item not in gone]
    seen.until("the pods", lambda: len(cluster.get("pods", seen.where)["items"]) == len(ALL))
    seen.until_event("NameTaken", name="wild")


def test_deleting_a_job_leaves_what_others_had_under_its_names(cluster: Cluster, seen: Seen, namespace: str) -> None:
    others = of_others(namespace, "default-deny")
    cluster.apply(others)
    before = stored(cluster, others)
    cluster.apply(manifest(namespace, "default-deny"))
    seen.until("NameTaken", lambda: seen.condition("Running", "default-deny").get("reason") == "NameTaken")
    conflicts, since = refusals(seen), time.monotonic()
    time.sleep(5)
    tried, passed = refusals(seen) - conflicts, time.monotonic() - since
    times = 2 + passed // RETRY_SECONDS
    assert tried <= times * len(others), "it is tried again slowly, as somebody has to act"
    cluster.kubectl("delete", "rlhfjob", "default-deny", seen.where)
    # A job of another name that came and went has been cleaned up, so the garbage collector has run.
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    kinds = "pods,services,configmaps,secrets,networkpolicies"
    seen.until("the other to be gone", lambda: not cluster.get(kinds, seen.where, f"--selector={LABEL}=job")["items"])
    assert stored(cluster, others) == before


def test_objects_that_only_carry_the_labels_of_a_job_are_not_its_own(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    uid = seen.job()["metadata"]["uid"]
    labels: dict[str, str] = {
        LABEL: "job",
        "rlhf.dev/job-uid": uid,
        "rlhf.dev/group": "generation",
        "rlhf.dev/index": "7",
    }
    alike = [
        secret(namespace, "alike", labels=labels),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "alike", "namespace": namespace}},
    ]
    alike[1]["metadata"]["labels"] = labels
    cluster.apply(alike)
    before = stored(cluster, alike)
    # Somebody takes our object over: the labels stay, the owner does not.
    change: list[dict[str, Any]] = [{"op": "remove", "path": "/metadata/ownerReferences"}]
    change += [{"op": "replace", "path": "/data", "value": {"job.json": "{}"}}]
    cluster.kubectl("patch", "configmap", "job-job", seen.where, "--type=json", f"--patch={json.dumps(change)}")
    forged = cluster.get("configmap", "job-job", seen.where)
    # The operator learns of ConfigMaps and of pods through independent watches.
    words = "ConfigMap job-job"
    seen.until("the words", lambda: words in seen.condition("Running").get("message", ""))
    seen.until("both to be ready", lambda: ready(seen)["generation"] == 2)
    cluster.kubectl("delete", "pod", "job-generation-1", seen.where)
    seen.until("the operator to see the pod go", lambda: ready(seen)["generation"] == 1)
    assert "generation-1" not in seen.pods(), "no pod is configured by what is not ours"
    assert words in seen.condition("Running")["message"]
    assert stored(cluster, [forged]) == [forged]
    cluster.kubectl("delete", "configmap", "job-job", seen.where)
    seen.until_pods(*ALL)
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    seen.until("no pods", lambda: not seen.pods())
    assert stored(cluster, alike) == before


def test_a_changed_service_is_applied_again_and_not_replaced(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    # Another version of the operator left another fingerprint.
    service = cluster.get("service", "job", seen.where)
    uid = service["metadata"]["uid"]
    mark = {"metadata": {"annotations": {"rlhf.dev/applied": "of another version"}}}
    cluster.kubectl("patch", "service", "job", seen.where, "--type=merge", f"--patch={json.dumps(mark)}")
    seen.until(
        "the Service to be as it should be",
        lambda: (
            cluster.get("service", "job", seen.where)["metadata"]["annotations"] == service["metadata"]["annotations"]
        ),
    )
    after = cluster.get("service", "job", seen.where, "--show-managed-fields")
    assert after["metadata"]["uid"] == uid
    ours = [
        managed_field
        for managed_field in after["metadata"]["managedFields"]
        if managed_field["manager"] == "rlhf-operator"
    ]
    assert [item["operation"] for item in ours] == ["Apply"], "the operator applies its fields and updates none"
