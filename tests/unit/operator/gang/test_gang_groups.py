"""Pod groups of jobs without a queue: missing schedulers, lost pods, groups that cannot change, and no gang."""

import pytest
from tests.support.operator.queued_cluster import EVERY_API
from tests.support.operator.simulated_cluster import EVERYBODY, SimulatedCluster


def test_a_backend_that_is_not_there_is_told_and_nothing_is_made() -> None:
    cluster = SimulatedCluster(scheduling={"gang": {"mode": "Volcano"}})
    cluster.settle()
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "NotAvailableInThisCluster")
    assert "install Volcano" in planned["message"]
    assert cluster.workers == []


def test_native_groups_come_with_the_pods_and_a_lost_pod_joins_again() -> None:
    cluster = SimulatedCluster()
    cluster.served = EVERY_API
    cluster.settle()
    assert {kind for kind, _ in cluster.bodies} >= {
        f"scheduling.k8s.io/v1beta1/{item}" for item in ("Workload", "PodGroup")
    }
    cluster.run()
    cluster.ask_deletion("job-generation-0")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.pods["job-generation-0"]["spec"]["schedulingGroup"] == {"podGroupName": "job"}


def test_a_group_that_cannot_change_is_replaced_when_no_pod_is_left() -> None:
    cluster = SimulatedCluster()
    cluster.served = type(EVERY_API)(frozenset(["scheduling.k8s.io/v1alpha2"]))
    place = ("scheduling.k8s.io/v1alpha2/PodGroup", "job")
    cluster.settle()
    cluster.run()
    cluster.job["spec"]["inference"]["replicas"] = 0
    cluster.settle()
    assert cluster.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 5
    cluster.job["spec"]["suspend"] = True
    while cluster.pods:
        cluster.settle()
        cluster.finish_deletions()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 4
    assert cluster.workers == [item for item in EVERYBODY if item != "inference-0"]


@pytest.mark.parametrize("mode", ["Disabled", "Auto"])
def test_without_a_gang_pods_are_those_of_before(mode: str) -> None:
    cluster, plain = SimulatedCluster(scheduling={"gang": {"mode": mode}}), SimulatedCluster()
    cluster.settle()
    plain.settle()
    assert {name: body["spec"] for name, body in cluster.pods.items()} == {
        name: body["spec"] for name, body in plain.pods.items()
    }
