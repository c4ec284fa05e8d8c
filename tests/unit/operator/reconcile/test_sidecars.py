"""A pod is over when its worker has ended for good, even if other containers still run."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import EVERYBODY, SimulatedCluster

from rlhf_operator.reconcile import ObservedPod, pod_of

RANKS = ["job-training-0", "job-training-1"]


def beside_sidecars(**spec: Any) -> SimulatedCluster:
    """Return a running job with a sidecar in every pod."""
    cluster = SimulatedCluster(**spec).begin()
    cluster.add_sidecar()
    cluster.settle()
    return cluster


def test_workers_that_ended_are_made_again_after_a_suspension_that_was_taken_back() -> None:
    cluster = beside_sidecars()
    for worker in ("generation-0", "generation-1", "training-0", "training-1"):
        cluster.end(worker, 0)
    cluster.later(16)
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-generation-0", "job-generation-1", *RANKS]
    assert set(cluster.deleting.values()) == {10}, "a sidecar that ignores its signal does not hold the place"
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.counts == (0, 0)


@pytest.mark.parametrize("left", [None, "generation-1"])
def test_a_coordinator_whose_kubelet_is_silent_has_ended_when_it_has_let_all_workers_go(left: str | None) -> None:
    """While a kubelet waits for the sidecar of a deleted pod, it does not report that the worker has ended."""
    cluster = beside_sidecars()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    cluster.ask_deletion("job-coordinator", 300)
    cluster.later(5)
    for worker in EVERYBODY[1:]:
        if worker != left:
            cluster.end_for_good(worker, 0)
    cluster.pods["job-coordinator"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.settle()
    look = cluster.plan().requeue_after
    assert look is not None
    cluster.later(look)
    forced = [deletion.name for deletion in cluster.plan().delete if deletion.force]
    if left is not None:
        assert forced == []
        return
    assert forced == ["job-coordinator"]
    assert look <= 17
    [event] = [event for event in cluster.plan().events if event.reason == "CoordinatorForced"]
    assert "its worker has released all others and has ended, but another container of the pod" in event.message
    cluster.settle()
    assert cluster.phase == "Suspended"
    assert set(cluster.deleting.values()) == {10}
    assert cluster.counts == (0, 0)


def test_a_suspension_is_over_when_the_workers_have_ended_and_the_sidecars_get_ten_seconds() -> None:
    cluster = beside_sidecars()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert list(cluster.deleting) == ["job-coordinator"]
    cluster.ask_deletion("job-coordinator", 300)
    cluster.later(5)
    cluster.end_for_good("coordinator", 130)
    cluster.settle()
    assert cluster.deleting["job-coordinator"] == 10
    assert set(RANKS) <= cluster.deleting.keys(), "the checkpoint is saved, so ranks need not stay"
    for worker in EVERYBODY[1:]:
        cluster.end_for_good(worker, 0)
    cluster.settle()
    assert cluster.phase == "Suspended"
    assert cluster.condition("Suspended")["status"] == "True"
    assert "continues from its last checkpoint" in cluster.condition("Suspended")["message"]
    assert set(cluster.deleting.values()) == {10}
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.counts == (0, 0)


def test_a_worker_beyond_the_size_leaves_with_a_sidecar_that_does_not() -> None:
    cluster = beside_sidecars()
    cluster.job["spec"]["generation"]["replicas"] = 1
    cluster.settle()
    assert cluster.deleting == {"job-generation-1": 30}
    cluster.end_for_good("generation-1", 0)
    cluster.settle()
    assert cluster.deleting == {"job-generation-1": 10}
    cluster.later(60)
    assert [item.name for item in cluster.plan().delete if item.force] == ["job-generation-1"]


@pytest.mark.parametrize(("code", "failed"), [(1, "BackoffLimitExceeded"), (21, "BadModel")])
def test_the_exit_code_of_the_worker_decides_beside_a_sidecar(code: int, failed: str) -> None:
    cluster = beside_sidecars(runPolicy={"backoffLimit": 0})
    cluster.end("training-0", code, message="the disk is on fire")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == failed
    assert sorted(cluster.deleting) == [f"job-{worker}" for worker in EVERYBODY]


def test_a_rank_that_fails_beside_a_sidecar_is_started_again_in_its_pod() -> None:
    cluster = beside_sidecars()
    cluster.end("training-0", 1)
    cluster.settle()
    assert cluster.deleting == {}
    assert cluster.counts == (1, 0)


def test_a_coordinator_that_ended_is_not_waited_for_by_a_deletion() -> None:
    cluster = beside_sidecars(checkpoints={"path": "/checkpoints", "onDeletion": "Save"})
    cluster.settle()
    cluster.job["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:11Z"
    cluster.carry_out(cluster.plan())
    cluster.end_for_good("coordinator", 130)
    assert cluster.plan().finalizer is False


def test_a_finished_job_keeps_no_pod_for_a_sidecar() -> None:
    cluster = beside_sidecars()
    for worker in EVERYBODY:
        cluster.end(worker, 0)
    cluster.settle()
    assert cluster.condition("Complete")["status"] == "True"
    assert sorted(cluster.deleting) == [f"job-{worker}" for worker in EVERYBODY]


def test_a_coordinator_that_ended_is_deleted_by_force_though_its_node_is_lost() -> None:
    cluster = beside_sidecars()
    cluster.ask_deletion("job-coordinator", 300)
    cluster.later(5)
    cluster.end_for_good("coordinator", 130)
    cluster.settle()
    cluster.later(3600)
    assert [item.name for item in cluster.plan().delete if item.force] == ["job-coordinator"]


@pytest.mark.parametrize(
    ("policy", "code", "deleted", "over"),
    [
        ({"restartPolicy": "OnFailure"}, 0, False, True),
        ({"restartPolicy": "OnFailure"}, 1, False, False),
        ({"restartPolicy": "OnFailure"}, 1, True, True),
        ({"restartPolicy": "Never"}, 1, False, True),
        ({"restartPolicy": "Always"}, 0, False, False),
        ({"containers": [{"name": "worker", "restartPolicy": "Never"}], "restartPolicy": "OnFailure"}, 1, False, True),
        ({}, 0, False, True),
    ],
)
def test_a_worker_ends_for_good_by_the_restart_policy_and_by_a_deletion(
    policy: dict[str, Any], code: int, deleted: bool, over: bool
) -> None:
    cluster = beside_sidecars()
    body = cluster.pods["job-generation-0"]
    body["spec"] = policy
    body["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code}}
    if deleted:
        cluster.ask_deletion("job-generation-0")
    pod = pod_of(body)
    assert isinstance(pod, ObservedPod)
    assert (pod.over, pod.lingers) == (over, over)
