"""The operator against a real API server, scheduler and garbage collector; pods run on fake nodes.

test_end_to_end.py adds training in real pods.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.operating.job_fixture import ALL, LABEL, TIMEOUT, Seen, manifest
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

CHILDREN = "pods,services,configmaps,secrets,networkpolicies"


def test_an_applied_job_gets_its_objects_and_conditions_and_takes_them_along(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    seen.until("the status", lambda: len(seen.job().get("status", {}).get("conditions", [])) == 8)
    assert seen.condition("Planned")["status"] == "True"
    seen.until("Starting", lambda: seen.condition("Running")["reason"] == "Starting")
    seen.until_event("Starting")
    children = cluster.get(CHILDREN, seen.where, f"--selector={LABEL}=job")["items"]
    uid = seen.job()["metadata"]["uid"]
    assert {child["metadata"]["ownerReferences"][0]["uid"] for child in children} == {uid}
    assert "arithmetic" not in cluster.kubectl("get", "rlhf", seen.where)
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    seen.until(
        "all children to be gone",
        lambda: not cluster.get(CHILDREN, seen.where, f"--selector={LABEL}=job")["items"],
    )


def test_groups_follow_kubectl_scale_and_edit(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    cluster.kubectl("scale", "rlhfjob/job", "--replicas=4", seen.where)
    seen.until_pods(*ALL, "generation-2", "generation-3")
    seen.until("the scale", lambda: seen.job()["status"]["scale"]["replicas"] == 4)
    patch = {"spec": {"generation": {"replicas": 1}, "inference": {"replicas": 2}}}
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=merge", f"--patch={json.dumps(patch)}")
    seen.until_pods("coordinator", "generation-0", "inference-0", "inference-1", "training-0", "training-1")
    seen.until("the scale", lambda: seen.job()["status"]["scale"]["replicas"] == 1)
    assert seen.restarts() == (0, 0)


def test_a_job_is_suspended_and_resumed(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=merge", '--patch={"spec":{"suspend":true}}')
    seen.until("Suspended", lambda: seen.condition("Suspended").get("status") == "True")
    seen.until("no pods", lambda: seen.pods() == {})
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=merge", '--patch={"spec":{"suspend":false}}')
    seen.until_pods(*ALL)
    seen.until("Suspended=False", lambda: seen.condition("Suspended")["status"] == "False")
    assert seen.restarts() == (0, 0)


def test_what_is_deleted_comes_back(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    before = {name: each["metadata"]["uid"] for name, each in seen.pods().items()}
    cluster.kubectl("delete", "pod/job-generation-1", "service/job", "configmap/job-job", seen.where)
    seen.until_pods(*ALL)
    seen.until("another generation-1", lambda: seen.uids().get("generation-1", "") not in ("", before["generation-1"]))
    for resource in ("service/job", "configmap/job-job"):
        named = ("get", resource, seen.where, "--ignore-not-found", "--output=name")
        seen.until(resource, lambda named=named: cluster.kubectl(*named))
    seen.until_restarts(0, 1)
    remaining = {name: each["metadata"]["uid"] for name, each in seen.pods().items() if name != "generation-1"}
    assert remaining == {name: uid for name, uid in before.items() if name != "generation-1"}


def test_an_exceeded_quota_is_told_and_the_job_starts_when_there_is_room(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": namespace}}
    cluster.apply(quota | {"spec": {"hard": {"pods": "3"}}})
    used = "{.status.used.pods}"
    seen.until("the quota", lambda: cluster.kubectl("get", "quota", "few", seen.where, f"-o=jsonpath={used}") == "0")
    cluster.apply(manifest(namespace))
    words = ("exceeded quota", "free quota in the namespace, or raise it")
    seen.until("the words", lambda: all(part in seen.condition("Running")["message"] for part in words))
    cluster.kubectl("delete", "quota", "few", seen.where)
    seen.until_pods(*ALL)


def test_pods_that_no_node_can_take_are_told(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace, generation={"replicas": 40, "gpusPerReplica": 1}))
    words = ("Insufficient nvidia.com/gpu", "spec.generation.replicas")
    said: dict[str, str] = {}

    def all_said() -> bool:
        said.update(seen.condition("Running"))
        return all(part in said["message"] for part in words)

    seen.until(f"{words}", all_said)
    assert said["reason"] == "Unschedulable"


def test_a_template_against_our_guarantees_is_refused_by_name(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace, generation={"replicas": 2, "template": {"spec": {"hostNetwork": True}}}))
    seen.until("InvalidManifest", lambda: seen.condition("Planned").get("reason") == "InvalidManifest")
    assert "spec.generation.template.spec.hostNetwork" in seen.condition("Planned")["message"]
    assert seen.pods() == {}


def test_pods_that_the_api_server_would_refuse_are_told_in_its_words_before_anything_is_made(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    typo = {"spec": {"nodeSelectr": {"zone": "a"}}}
    cluster.apply(manifest(namespace, generation={"replicas": 2, "template": typo}))
    message = 'unknown field "spec.nodeSelectr"'
    seen.until("PodsRefused", lambda: message in seen.condition("Planned").get("message", ""))
    assert seen.condition("Planned")["reason"] == "PodsRefused"
    assert "did you mean nodeSelector?" in seen.condition("Planned")["message"]
    assert cluster.get(CHILDREN, seen.where, f"--selector={LABEL}=job")["items"] == []
    wrong = [{"op": "replace", "path": "/spec/generation/template/spec", "value": {"tolerations": [{"key": "a/b/c"}]}}]
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=json", f"--patch={json.dumps(wrong)}")
    seen.until("its words", lambda: "spec.tolerations[0].key" in seen.condition("Planned").get("message", ""))
    right = json.dumps([{"op": "remove", "path": "/spec/generation/template"}])
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=json", f"--patch={right}")
    seen.until_pods(*ALL)


def test_a_malformed_template_is_told_and_the_job_can_be_deleted(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace, checkpoints={"path": "/checkpoints", "onDeletion": "Save"}))
    seen.until_pods(*ALL)
    patch = json.dumps({"spec": {"training": {"template": {"spec": {"containers": {"worker": {}}}}}}})
    cluster.kubectl("patch", "rlhfjob", "job", seen.where, "--type=merge", f"--patch={patch}")
    seen.until("InvalidManifest", lambda: seen.condition("Planned").get("reason") == "InvalidManifest")
    assert "spec.training.template.spec.containers" in seen.condition("Planned")["message"]
    cluster.kubectl("delete", "rlhfjob", "job", seen.where, "--wait=false")
    with pytest.raises(ClusterError, match="not found"):
        seen.until("the end of the job", lambda: not seen.job())


def test_failed_pods_are_replaced_until_the_limit_and_a_finished_job_expires(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(manifest(namespace, runPolicy={"backoffLimit": 1, "ttlSecondsAfterFinished": 3}))
    for failures in (1, 2):
        seen.until_pods(*ALL)
        seen.report("generation-0", {"phase": "Failed", "reason": "Broken", "message": "the disk is on fire"})
        wanted = failures
        seen.until("the count", lambda: _failures(seen) >= wanted)  # noqa: B023 used at once
    seen.until_event("Failed")
    with pytest.raises(ClusterError, match="not found"):
        seen.until("the end of the job", lambda: not seen.job())


def _failures(seen: Seen) -> int:
    try:
        return int(seen.job()["status"]["restarts"]["failures"])
    except ClusterError:
        return 1000  # expired already


def test_an_operator_that_is_killed_and_comes_back_goes_on_where_it_was(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    before = {name: each["metadata"]["uid"] for name, each in seen.pods().items()}
    operator.kill()
    cluster.kubectl("delete", "pod/job-inference-0", seen.where)
    cluster.kubectl("scale", "rlhfjob/job", "--replicas=3", seen.where)
    operator.start()
    seen.until_pods(*ALL, "generation-2")
    after = {name: each["metadata"]["uid"] for name, each in seen.pods().items()}
    assert {name for name in before if before[name] != after[name]} == {"inference-0"}


def test_an_idle_operator_writes_nothing_but_its_lease(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    cluster.apply([manifest(namespace, f"idle-{number}", suspend=True) for number in range(20)])
    seen.until(
        "all to be Suspended",
        lambda: all(seen.condition("Suspended", f"idle-{item}").get("status") == "True" for item in range(20)),
    )

    def asked() -> float:
        total = operator.metric("rlhf_operator_api_requests_total")
        return total - operator.metric("rlhf_operator_api_requests_total", resource="leases")

    # Other tests of this module may still be ending their jobs.
    quiet = 0.0
    deadline = time.monotonic() + TIMEOUT
    while quiet < 5:
        assert time.monotonic() < deadline, "requests never stop"
        before = asked()
        time.sleep(1)
        quiet = quiet + 1 if asked() == before else 0
    assert operator.healthy()


def test_a_second_operator_waits_and_takes_over_at_once_when_the_first_is_asked_to_stop(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    second = OperatorProcess(cluster)
    operator.stop(signal.SIGTERM)
    second.start()
    operator_again = operator
    try:
        with pytest.raises(TimeoutError):
            operator_again.start(patience=6)
        operator_again.check()
        assert second.stop(signal.SIGTERM) == 0
        wait_until("the first to lead again", lambda: operator_again.metric("rlhf_operator_leader") == 1, TIMEOUT)
    finally:
        second.stop()
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
