"""Gangs on a real API server: Kubernetes' own with the real scheduler, the others against the fields that we set.

The definitions in crds/ contain these fields of the published APIs of Kueue, Volcano and coscheduling; the test plays
their controllers through the API server.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.audit import Audit
from tests.cluster.cluster import Cluster
from tests.cluster.kwok import TAINT
from tests.cluster.operating.job_fixture import ALL, ROOT, SHARED_FILES, Seen, manifest
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.cluster.releases.chart import FLAVORS, HOME, RELEASE, SCHEDULING, render, triples

from rlhf_operator.gang.apis import MODES

pytestmark = pytest.mark.full


CRDS = Path(__file__).parents[1] / "crds"
PATIENCE = 240.0  # seconds
ACCOUNT = f"system:serviceaccount:{HOME}:{RELEASE}"
GATES = {"GenericWorkload": True, "GangScheduling": True}


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Return the audit log of the API server."""
    return Audit(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def cluster(audit: Audit) -> Iterator[Cluster]:
    """Yield a control plane with gang scheduling switched on; no node yet."""
    with Cluster(
        level="control-plane",
        feature_gates=GATES,
        runtime_config=["scheduling.k8s.io/v1alpha2=true"],
        component_args={"kube-apiserver": audit.arguments},
    ) as started:
        for item in (ROOT / "crds" / "rlhfjobs.yaml", *sorted(CRDS.glob("*.yaml"))):
            started.define(item)
        yield started


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator with exactly the rights of the chart; it finds every backend when it starts."""
    switched_on = {"scheduling": {mode.lower(): True for mode in MODES}}
    for (kind, _), body in render(switched_on).items():
        if kind in ("ClusterRole", "ClusterRoleBinding"):
            cluster.apply(body)
    account = cluster.user(ACCOUNT)
    process = OperatorProcess(cluster, "--no-leader-election", kubeconfig=account)
    try:
        process.start(PATIENCE)
        yield process
    finally:
        process.stop()


LARGE = {"spec": {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "16"}}}]}}
"""Pod template: four pods fill a fake node of 64 CPUs; five are the minimum of the job below, six all of it."""


def add_node(cluster: Cluster, first: int) -> None:
    """Add a fake node that accepts any pod."""
    for name in cluster.add_kwok_nodes(1, gpus=0, first=first):
        cluster.kubectl("taint", "node", name, f"{TAINT['key']}-")


def large(namespace: str, name: str = "job", mode: str = "Auto") -> dict[str, Any]:
    """Return a job of six large pods."""
    gang = {"gang": {"mode": mode}}
    job = manifest(namespace, name, coordinator={"template": LARGE}, scheduling=gang)
    for group in ("generation", "inference", "training"):
        job["spec"][group]["template"] = LARGE
    files = SHARED_FILES["spec"]
    [worker] = LARGE["spec"]["containers"]
    job["spec"]["training"]["template"] = {"spec": files | {"containers": [worker | files["containers"][0]]}}
    return job


def bound(seen: Seen, name: str = "job") -> list[str]:
    """Return the pods with a node."""
    return sorted(worker for worker, each in seen.pods(name).items() if each["spec"].get("nodeName"))


def test_a_native_gang_gets_all_its_pods_bound_or_none(cluster: Cluster, seen: Seen, namespace: str) -> None:
    add_node(cluster, 200)
    cluster.apply(large(namespace, "loose", "Disabled"))
    seen.until("what has room to hold it", lambda: len(bound(seen, "loose")) == 4, PATIENCE)
    cluster.kubectl("delete", "rlhfjob", "loose", seen.where)
    seen.until("room", lambda: not seen.pods("loose"), PATIENCE)
    cluster.apply(large(namespace))
    seen.until("six pods", lambda: len(seen.pods()) == 6, PATIENCE)
    groups = cluster.get("podgroups.scheduling.k8s.io", "job", seen.where)
    assert groups["spec"]["schedulingPolicy"]["gang"]["minCount"] == 5
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in seen.pods().values()} == {"job"}

    def refused() -> bool:
        conditions = [c for pod in seen.pods().values() for c in pod["status"].get("conditions", [])]
        return bool(
            sum(condition["type"] == "PodScheduled" and condition["status"] == "False" for condition in conditions) >= 5
        )

    seen.until("the scheduler to look at all", refused, PATIENCE)
    assert bound(seen) == []
    add_node(cluster, 201)
    seen.until("all pods on a node", lambda: bound(seen) == ALL, PATIENCE)
    lost = seen.uids()["generation-0"]
    cluster.kubectl("delete", "pod/job-generation-0", seen.where, "--wait=false")
    seen.until("another generation-0", lambda: seen.uids().get("generation-0", lost) != lost, PATIENCE)
    seen.until("it to be bound", lambda: bound(seen) == ALL, PATIENCE)
    cluster.kubectl("scale", "rlhfjob/job", "--replicas=3", seen.where)
    seen.until("a third generation pod", lambda: "generation-2" in bound(seen), PATIENCE)
    seen.patch(suspend=True)
    seen.until_gone("podgroups.scheduling.k8s.io", "job")
    seen.until_gone("workloads.scheduling.k8s.io", "job")


def named(namespace: str, mode: str, **more: Any) -> dict[str, Any]:
    """Return a job that asks for a backend by name."""
    return manifest(namespace, scheduling={"gang": {"mode": mode, **more}, "priorityClassName": "high"})


@pytest.fixture(scope="module", autouse=True)
def priority(cluster: Cluster) -> None:
    """Create the priority class, because the API server refuses pods of a missing class."""
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 7}
    cluster.apply(kind)


def test_volcano_gets_a_group_that_its_definition_takes(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(named(namespace, "Volcano", queue="research"))
    seen.until("six pods", lambda: len(seen.pods()) == 6, PATIENCE)
    spec = cluster.get("podgroups.scheduling.volcano.sh", "job", seen.where)["spec"]
    assert spec == {
        "minMember": 5,
        "minResources": {"cpu": "5", "memory": "4831838208"},
        "queue": "research",
        "priorityClassName": "high",
    }
    for pod in seen.pods().values():
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "job"
        assert (pod["spec"]["schedulerName"], pod["spec"]["priority"]) == ("volcano", 7)
    seen.patch(inference={"replicas": 0})
    group = ("podgroups.scheduling.volcano.sh", "job", seen.where)
    seen.until("a smaller minimum", lambda: cluster.get(*group)["spec"]["minMember"] == 4, PATIENCE)
    seen.patch(suspend=True)
    seen.until_gone("podgroups.scheduling.volcano.sh", "job")


def test_coscheduling_gets_a_group_that_follows_the_jobs_size(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(named(namespace, "Coscheduling", timeoutSeconds=60))
    seen.until("six pods", lambda: len(seen.pods()) == 6, PATIENCE)
    group = ("podgroups.scheduling.x-k8s.io", "job", seen.where)
    assert cluster.get(*group)["spec"]["scheduleTimeoutSeconds"] == 60
    assert {pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for pod in seen.pods().values()} == {"job"}
    seen.patch(inference={"replicas": 0})
    seen.until("a smaller minimum", lambda: cluster.get(*group)["spec"]["minMember"] == 4, PATIENCE)
    seen.patch(suspend=True)
    seen.until_gone("podgroups.scheduling.x-k8s.io", "job")


class Kueue:
    """Kueue's part, played by the test."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.cluster = seen, seen.cluster

    def workload(self) -> dict[str, Any]:
        items = self.cluster.get("workloads.kueue.x-k8s.io", self.seen.where)["items"]
        return items[0] if items else {}

    def sizes(self) -> dict[str, int]:
        """Return the number of pods by pod set; empty between two Workloads."""
        pod_sets = self.workload().get("spec", {}).get("podSets", [])
        return {pod_set["name"]: pod_set["count"] for pod_set in pod_sets}

    def condition(self, kind: str) -> str:
        conditions = self.workload().get("status", {}).get("conditions", [])
        return next((str(condition["status"]) for condition in conditions if condition["type"] == kind), "")

    def write(self, conditions: dict[str, tuple[str, str]], admission: dict[str, Any] | None = None) -> None:
        """Write conditions, type -> (status, reason), and an admission if one is given."""
        status = self.workload().get("status", {})
        unchanged = [condition for condition in status.get("conditions", []) if condition["type"] not in conditions]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        fresh = [
            {"type": kind, "status": value, "reason": reason, "message": f"{reason}.", "lastTransitionTime": now}
            for kind, (value, reason) in conditions.items()
        ]
        patch = {"status": {"conditions": [*unchanged, *fresh]} | ({"admission": admission} if admission else {})}
        arguments = (self.seen.where, "--subresource=status", "--type=merge", f"--patch={json.dumps(patch)}")
        self.cluster.kubectl("patch", "workloads.kueue.x-k8s.io", "rlhfjob-job", *arguments)

    def admit(self) -> None:
        names = [pod_set["name"] for pod_set in self.workload()["spec"]["podSets"]]
        assigned = [{"name": name, "flavors": {"cpu": "h200"}} for name in names]
        true = {kind: ("True", kind) for kind in ("QuotaReserved", "Admitted")}
        self.write(
            {**true, "Evicted": ("False", "QuotaReserved")}, {"clusterQueue": "gpus", "podSetAssignments": assigned}
        )


def test_a_queued_job_starts_ends_and_starts_again_as_kueue_says(cluster: Cluster, seen: Seen, namespace: str) -> None:
    flavor = {"nodeLabels": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    cluster.apply(
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "h200"}, "spec": flavor}
    )
    job = manifest(namespace, scheduling={"priorityClassName": "high"})
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    cluster.apply(job)
    kueue = Kueue(seen)
    seen.until("the Workload", kueue.workload, PATIENCE)
    seen.until("Queued", lambda: seen.condition("Running").get("reason") == "Queued", PATIENCE)
    assert kueue.workload()["spec"]["priority"] == 7
    seen.until("its queue", lambda: "LocalQueue team" in seen.condition("Admitted")["message"], PATIENCE)
    assert seen.pods() == {}
    assert not cluster.get("services,secrets", seen.where)["items"]
    for size in (3, 2):
        cluster.kubectl("scale", "rlhfjob/job", f"--replicas={size}", seen.where)
        seen.until(f"a Workload of {size}", lambda: kueue.sizes().get("generation") == size, PATIENCE)  # noqa: B023

    kueue.admit()
    seen.until("six pods", lambda: len(seen.pods()) == 6, PATIENCE)
    for pod in seen.pods().values():
        assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
        assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
    seen.until("QuotaReserved", lambda: seen.condition("Admitted")["reason"] == "QuotaReserved", PATIENCE)
    seen.until("PodsReady", lambda: kueue.condition("PodsReady") == "False", PATIENCE)

    kueue.write({"Evicted": ("True", "Preempted")})
    seen.until("no pods", lambda: not seen.pods(), PATIENCE)
    seen.until("the reservation to be given back", lambda: kueue.condition("QuotaReserved") == "False", PATIENCE)
    assert "admission" not in kueue.workload()["status"]
    assert (kueue.condition("Requeued"), kueue.condition("PodsReady")) == ("True", "False")
    seen.until("Evicted", lambda: seen.condition("Admitted")["reason"] == "Evicted", PATIENCE)

    kueue.admit()
    seen.until("six pods again", lambda: len(seen.pods()) == 6, PATIENCE)
    workload, pods = kueue.workload()["metadata"], seen.uids()
    assert workload["labels"]["kueue.x-k8s.io/job-uid"] == seen.job()["metadata"]["uid"]
    cluster.kubectl("scale", "rlhfjob/job", "--replicas=3", seen.where)
    seen.until("the limit", lambda: seen.condition("Resizing")["reason"] == "LimitedByQueue", PATIENCE)
    assert "generation stays at 2 of 3 pods" in seen.condition("Admitted")["message"]
    assert (kueue.workload()["metadata"]["uid"], seen.uids()) == (workload["uid"], pods)
    seen.patch(suspend=True)
    seen.until("no Workload", lambda: not kueue.workload(), PATIENCE)
    seen.until("no queue", lambda: seen.condition("Admitted")["reason"] == "NotQueued", PATIENCE)
    seen.patch(suspend=False)
    seen.until("it to ask for three", lambda: kueue.sizes().get("generation") == 3, PATIENCE)
    assert seen.pods() == {}

    job["metadata"] |= {"name": "gold"}
    job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "nosuch"
    cluster.apply(job)
    unread = "WorkloadPriorityClass nosuch cannot be read"
    seen.until(unread, lambda: unread in seen.condition("Admitted", "gold").get("message", ""), PATIENCE)


def test_a_job_of_multikueue_is_left_alone(cluster: Cluster, seen: Seen, namespace: str) -> None:
    cluster.apply(manifest(namespace, "other", managedBy="kueue.x-k8s.io/multikueue"))
    cluster.apply(manifest(namespace))
    seen.until("the job beside it", lambda: len(seen.pods()) == 6, PATIENCE)
    assert "status" not in seen.job("other")
    assert seen.pods("other") == {}


def test_every_right_of_every_backend_was_made_use_of(audit: Audit, request: pytest.FixtureRequest) -> None:
    if sum(item.path == request.path for item in request.session.items) < len(TESTS) or request.session.testsfailed:
        pytest.skip("the tests of this module before it use the rights")
    granted = triples(FLAVORS).union(*map(triples, SCHEDULING.values()))
    # Objects that no watch reported are read by name, and the native API allows changes from v1beta1 on.
    native = {("scheduling.k8s.io", "workloads", "patch"), ("scheduling.k8s.io", "podgroups", "patch")}
    wanted = {right for right in granted - native if right[1:] not in (("workloads", "get"), ("podgroups", "get"))}
    with contextlib.suppress(TimeoutError):  # the last requests of the previous test may be in flight
        wait_until("every right to be used", lambda: wanted <= audit.used(ACCOUNT), PATIENCE)
    assert wanted - audit.used(ACCOUNT) == set()


TESTS = [name for name in globals() if name.startswith("test_")]
