"""The life of a job against a real API server: failures by rule, rollouts, deletion, certificates, repairs.

Pods run on fake nodes; the tests write the statuses that kubelets would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.kwok import TOLERATION
from tests.cluster.operating.job_fixture import ALL, SHARED_FILES, TIMEOUT, Seen, manifest
from tests.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.full


CERTIFICATE_SECONDS = 30  # renewed after 20
WATCHED_SECONDS = 25  # a name that is refused at once gets at most four pods in this time


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator with certificates that last half a minute."""
    with OperatorProcess(cluster, f"--certificate-lifetime-seconds={CERTIFICATE_SECONDS}") as process:
        yield process


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """Return the status of a pod whose container has ended permanently."""
    state = {"exitCode": code, "reason": reason, "message": message, "containerID": f"containerd://{code:064x}"}
    container = {"name": "worker", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    return {"phase": "Failed", "containerStatuses": [container | {"state": {"terminated": state}}]}


def waiting(reason: str, message: str) -> dict[str, Any]:
    """Return the status of a pod whose container cannot start."""
    container = {"name": "worker", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [container | {"state": state}]}


def epochs(seen: Seen) -> dict[str, set[str]]:
    """Return group -> epochs of its pods."""
    result: dict[str, set[str]] = {}
    for pod in seen.pods().values():
        labels = pod["metadata"]["labels"]
        result.setdefault(labels["rlhf.dev/group"], set()).add(labels["rlhf.dev/epoch"])
    return result


def test_failure_rules_restart_a_group_then_the_job_and_end_it_at_last(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    rules = [
        {"name": "cuda", "action": "Restart", "scope": "Group", "onExitCodes": {"values": [3]}},
        {"name": "fabric", "action": "Ignore", "scope": "Job", "onExitCodes": {"values": [4]}},
        {"name": "license", "action": "FailJob", "groups": ["inference"], "onExitCodes": {"values": [5]}},
    ]
    cluster.apply(manifest(namespace, runPolicy={"backoffLimit": 1, "failurePolicy": {"rules": rules}}))
    seen.until_pods(*ALL)
    before = seen.uids()
    seen.report("training-1", ended(3))
    seen.until("ranks of epoch 1", lambda: epochs(seen).get("training") == {"1"} and seen.running() == sorted(ALL))
    assert {name for name, uid in seen.uids().items() if uid != before[name]} == {"training-0", "training-1"}
    seen.until_restarts(1, 0)
    seen.report("generation-0", ended(4))
    seen.until("everything of another epoch", lambda: not before.items() & seen.uids().items())
    again = {"coordinator": {"1"}, "generation": {"1"}, "inference": {"1"}, "training": {"2"}}
    seen.until(f"epochs {again}", lambda: epochs(seen) == again)
    seen.until_pods(*ALL)
    seen.until_restarts(1, 1)
    seen.until_event("GroupRestart", "JobRestart", "FailureIgnored")
    seen.report("inference-0", ended(5, message="no seat is left \U0001f3d6\x7f"))
    seen.until("Failed", lambda: seen.condition("Failed").get("reason") == "FailurePolicy")
    assert (
        "job-inference-0: exit code 5: no seat is left \U0001f3d6\x7f (rule license"
        in seen.condition("Failed")["message"]
    )


def test_a_place_whose_pods_are_refused_at_once_gets_few_of_them_and_the_kubelets_words_are_told(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    message = "Pod was rejected: Allocate failed due to rpc error: device plugin is sick"
    refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    again = "before it creates job-generation-0 again, because job-generation-0 ended"
    words = ("waits until", again, f"disrupted (UnexpectedAdmissionError: {message})")
    names: set[str] = set()
    since = time.monotonic()

    def wait_is_said() -> bool:
        """Refuse each pod until the condition reports the wait for the next one."""
        result = seen.pods().get("generation-0", {})
        meta = result.get("metadata", {"deletionTimestamp": "gone"})
        if "deletionTimestamp" not in meta and result["status"].get("phase") == "Running":
            names.add(meta["uid"])
            seen.report("generation-0", refused)
        passed = time.monotonic() - since
        assert len(names) <= 4 or passed > WATCHED_SECONDS, "made at once, then 10 s and 20 s after the one before"
        return passed > WATCHED_SECONDS and all(part in seen.condition("Running")["message"] for part in words)

    seen.until("the wait to be said", wait_is_said)
    assert seen.restarts()[0] == 0
    full = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": 'Usage of EmptyDir volume "tmp" exceeds the limit "1Mi". ',
    }
    seen.report("generation-1", full)
    seen.until("an eviction by its own fault is a failure", lambda: seen.restarts()[0] == 1)
    assert seen.job()["status"]["restarts"]["lastReason"].startswith("job-generation-1: Evicted: Usage of EmptyDir")


def test_a_changed_template_is_rolled_without_a_restart_being_counted(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(manifest(namespace, checkpoints={"path": "/checkpoints"}))
    seen.until_pods(*ALL)
    before = seen.uids()

    def images(group: str) -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for name, pod in seen.pods().items() if name.startswith(group)}

    template = {"spec": {"containers": [{"name": "worker", "image": "example.org/worker:2"}]}}
    seen.patch(generation={"template": template})
    seen.until("new generation pods", lambda: images("generation") == {"example.org/worker:2"})
    seen.until_pods(*ALL)
    unchanged = {name for name, uid in seen.uids().items() if uid == before[name]}
    assert unchanged == {item for item in ALL if not item.startswith("generation")}
    [mounting] = SHARED_FILES["spec"]["containers"]
    ranks = {"spec": {"containers": [mounting | {"image": "example.org/worker:2"}]}}
    seen.patch(training={"template": ranks})
    seen.until("new ranks", lambda: images("training") == {"example.org/worker:2"})
    seen.until_pods(*ALL)
    # The coordinator saved a checkpoint first, and ended.
    seen.until("another coordinator", lambda: seen.uids().get("coordinator", "") not in ("", before["coordinator"]))
    seen.until_pods(*ALL)
    assert seen.uids()["inference-0"] == before["inference-0"]
    old = seen.uids()
    seen.patch(iterations=200)
    seen.until("another coordinator", lambda: seen.uids().get("coordinator", old["coordinator"]) != old["coordinator"])
    seen.until_pods(*ALL)
    assert {name for name, uid in seen.uids().items() if uid != old[name]} == {"coordinator"}
    assert seen.restarts() == (0, 0)
    seen.until_event("RollingUpdate")


def test_a_deletion_waits_for_a_checkpoint_and_never_for_ever(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    checkpoints = {"path": "/checkpoints", "onDeletion": "Save", "deletionDeadlineSeconds": 5}
    cluster.apply(manifest(namespace, checkpoints=checkpoints))
    seen.until_pods(*ALL)
    seen.until("the finalizer", lambda: seen.job()["metadata"].get("finalizers") == ["rlhf.dev/checkpoint"])
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    seen.until_event("Checkpointing")
    seen.until("no pods", lambda: not seen.pods())

    # A finalizer keeps the coordinator's pod, as if its node did not answer.
    cluster.apply(manifest(namespace, checkpoints=checkpoints))
    seen.until_pods(*ALL)
    hang = '--patch={"metadata":{"finalizers":["example.org/hangs"]}}'
    cluster.kubectl("patch", "pod", "job-coordinator", seen.where, "--type=merge", hang)
    cluster.kubectl("delete", "rlhfjob", "job", seen.where)
    seen.until_event("CheckpointMissed")
    let_go = '--patch={"metadata":{"finalizers":null}}'
    cluster.kubectl("patch", "pod", "job-coordinator", seen.where, "--type=merge", let_go)

    # Without an operator, a user removes the finalizer.
    cluster.apply(manifest(namespace, "orphan", checkpoints=checkpoints))
    seen.until("the finalizer", lambda: seen.job("orphan")["metadata"].get("finalizers"))
    operator.stop()
    try:
        cluster.kubectl("delete", "rlhfjob", "orphan", seen.where, "--wait=false")
        cluster.kubectl("patch", "rlhfjob", "orphan", seen.where, "--type=merge", let_go)
        result = ("get", "rlhfjob", "orphan", seen.where, "--ignore-not-found", "--output=name")
        assert cluster.kubectl(*result) == ""
    finally:
        operator.start()


def test_neither_foreground_deletion_nor_that_of_the_namespace_hangs(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    cluster.kubectl("delete", "rlhfjob", "job", seen.where, "--cascade=foreground")
    assert seen.pods() == {}, "children go first"
    cluster.apply(manifest(namespace, checkpoints={"path": "/checkpoints", "onDeletion": "Save"}))
    seen.until_pods(*ALL)
    cluster.kubectl("delete", "namespace", namespace, timeout=TIMEOUT)


def test_what_is_ours_comes_back_when_somebody_deletes_it(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    before = seen.uids()
    ours = ["service/job", "service/job-coordinator", "configmap/job-job", "networkpolicy/job"]
    ours += ["secret/job-certificates"]
    uid = "--output=jsonpath={.metadata.uid}"
    old = {item: cluster.kubectl("get", item, seen.where, uid) for item in ours}
    cluster.kubectl("delete", *ours, seen.where)

    def back(name: str) -> bool:
        result = cluster.kubectl("get", name, seen.where, uid, "--ignore-not-found")
        return result not in ("", old[name])

    for each in ours:
        # The Secret is not read while everything runs: a starting pod needs it.
        if each.startswith("secret"):
            cluster.kubectl("delete", "pod/job-generation-1", seen.where)
        seen.until(each, lambda each=each: back(each))
    seen.until_pods(*ALL)
    assert {name for name, found in seen.uids().items() if found != before[name]} == {"generation-1"}
    seen.until_restarts(0, 1)


def test_an_evicted_pod_is_a_disruption(cluster: Cluster, seen: Seen, namespace: str, tmp_path: Path) -> None:
    cluster.apply(manifest(namespace, runPolicy={"backoffLimit": 0}))
    seen.until_pods(*ALL)
    before = seen.uids()
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    eviction["metadata"] = {"name": "job-generation-1", "namespace": namespace}  # type: ignore[assignment]
    (tmp_path / "eviction.json").write_text(json.dumps(eviction))
    path = f"/api/v1/namespaces/{namespace}/pods/job-generation-1/eviction"
    cluster.kubectl("create", f"--raw={path}", f"--filename={tmp_path / 'eviction.json'}")
    seen.until("another pod", lambda: seen.uids().get("generation-1", before["generation-1"]) != before["generation-1"])
    seen.until_pods(*ALL)
    seen.until_restarts(0, 1)
    assert "EvictionByEvictionAPI" in seen.job()["status"]["restarts"]["lastReason"]
    assert seen.condition("Failed")["status"] == "False"


def test_the_words_of_kubelets_reach_the_user(cluster: Cluster, seen: Seen, namespace: str) -> None:
    image = "example.org/worker:nosuch"
    template = {"spec": {"containers": [{"name": "worker", "image": image}]}}
    cluster.apply(manifest(namespace, runPolicy={"backoffLimit": 5}, inference={"replicas": 1, "template": template}))
    seen.until_pods(*ALL)
    seen.report("inference-0", waiting("ErrImagePull", f"{image}: not found"))
    wanted = f"job-inference-0 cannot get the image ({image}: not found): correct the image"
    seen.until("the words", lambda: wanted in seen.condition("Running")["message"])
    seen.report("generation-0", waiting("ErrImagePull", "rlhf/worker: not found"))
    default = "spec.generation.template names none, so it is the operator's default: push it there"
    seen.until("the words on a default image", lambda: default in seen.condition("Running")["message"])
    seen.report("generation-1", ended(137, "OOMKilled"))
    seen.until_restarts(1, 0)
    reason = seen.job()["status"]["restarts"]["lastReason"]
    assert "raise resources.limits.memory in its pod template" in reason


def test_the_words_of_scheduler_and_api_server_come_with_a_remedy(cluster: Cluster, seen: Seen, namespace: str) -> None:
    """Check the API server's and the scheduler's messages, which may change with a version of Kubernetes."""
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "nosuch"}}
    wanted = {
        "claim": ({"volumes": [volume]}, "see that the claim exists in namespace"),
        "selector": (
            {"nodeSelector": {"gpu": "nosuch"}},
            "correct nodeSelector or affinity in spec.inference.template",
        ),
        "account": ({"serviceAccountName": "nosuch"}, "or correct serviceAccountName in the pod template"),
        "level": ({"hostNetwork": True}, "hostNetwork"),
    }
    for name, (pod_spec, _) in wanted.items():
        cluster.apply(manifest(namespace, name, inference={"replicas": 1, "template": {"spec": pod_spec}}))
    cluster.apply(manifest(namespace, "gpus", inference={"replicas": 1, "gpusPerReplica": 64}))
    for name, says in [
        *((name, says) for name, (_, says) in wanted.items()),
        ("gpus", "lower spec.inference.replicas"),
    ]:
        kind = "Planned" if name == "level" else "Running"
        seen.until(says, lambda says=says, name=name, kind=kind: says in seen.condition(kind, name).get("message", ""))
    seen.until("Unschedulable", lambda: seen.condition("Running", "gpus")["reason"] == "Unschedulable")
    words = "Insufficient nvidia.com/gpu"
    seen.until(words, lambda: words in seen.condition("Running", "gpus")["message"])


def test_pods_of_a_lost_node_come_back_when_there_is_another(cluster: Cluster, seen: Seen, namespace: str) -> None:
    only = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "kwok-200"}, "tolerations": [TOLERATION]}}
    node = cluster.add_kwok_nodes(1, gpus=0, first=200)[0]
    job = manifest(namespace, runPolicy={"backoffLimit": 0}, inference={"replicas": 1, "template": only})
    cluster.apply(job)
    seen.until_pods(*ALL)
    before = seen.uids()
    # This taint stands for that of a silent node, which pods tolerate for five minutes by default.
    lost = "example.org/unreachable:NoExecute"
    cluster.kubectl("taint", "node", node, lost)
    message = "Unschedulable"
    seen.until(message, lambda: seen.condition("Running")["reason"] == message)
    words = "no node can take job-inference-0"
    seen.until(words, lambda: words in seen.condition("Running")["message"])
    assert "DeletionByTaintManager" in seen.job()["status"]["restarts"]["lastReason"]
    cluster.kubectl("taint", "node", node, f"{lost}-")

    def evicted() -> int:
        events = cluster.get("events", seen.where)["items"]
        return sum(event["message"].startswith("Marking for deletion") for event in events)

    def replaced() -> set[str]:
        return {name for name, uid in seen.uids().items() if uid != before[name]}

    seen.until_pods(*ALL)
    seen.until("another pod in the place of the lost one", lambda: replaced() == {"inference-0"})
    # The scheduler may see the node without its taint before the taint manager does, which then evicts a second pod.
    seen.until("a disruption for each eviction", lambda: seen.restarts() == (0, evicted()) and evicted() > 0)


def test_certificates_are_renewed_in_time_and_pods_go_on(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace))
    seen.until_pods(*ALL)
    before = seen.uids()

    def data() -> dict[str, str]:
        result: dict[str, str] = cluster.get("secret", "job-certificates", seen.where)["data"]
        return result

    first = data()
    seen.until("a new certificate", lambda: data()["tls.crt"] != first["tls.crt"], CERTIFICATE_SECONDS + TIMEOUT)
    assert data()["ca.crt"] == first["ca.crt"], "the others trust it still"
    assert seen.uids() == before
    assert seen.restarts() == (0, 0)
