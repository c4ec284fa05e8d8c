"""Waiting for capacity ends nothing and is reported; pods that cannot start do not block the others' GPUs forever."""

from typing import Any

import pytest
from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.timestamps import rfc3339

PULL = ("ImagePullBackOff", 'Back-off pulling image "registry/worker:v0"')
LIMIT = 1800.0
NO_GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def begun(**spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(**spec)
    cluster.settle()
    return cluster


def kept_from_starting(worker: str = "training-0", **spec: Any) -> SimulatedCluster:
    """All pods run except one."""
    cluster = begun(**spec)
    cluster.wait_with(worker, *PULL)
    cluster.run(*(item for item in cluster.workers if item != worker))
    cluster.read("Starting", iteration=0, working={}, waiting_for=(f"{worker} to register (3 s)",))
    return cluster


def test_an_hour_without_gpus_ends_nothing_and_is_told_with_its_beginning() -> None:
    cluster = begun()
    cluster.run("coordinator", "generation-0", "generation-1", "inference-0", "training-1")
    since = rfc3339(cluster.now)
    cluster.cannot_schedule("training-0", NO_GPUS)
    cluster.pods["job-training-0"]["status"]["conditions"][0]["lastTransitionTime"] = since
    for _ in range(24):
        cluster.later(300)
        cluster.read("Starting", iteration=0, working={}, waiting_for=("training-0 to register (3 s)",))
        cluster.settle()
    assert cluster.phase == "Unschedulable"
    assert (
        f"no node can take job-training-0 since {since} (0/3 nodes are available: 3 Insufficient"
        in cluster.running_message
    )
    assert cluster.condition("Failed")["status"] == "False"
    assert cluster.job["status"]["restarts"]["failures"] == 0
    assert len(cluster.pods) == 6, "a gang or a queue is what keeps the others from holding their GPUs"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        PULL,
        ("InvalidImageName", "couldn't parse image name"),
        ("CreateContainerConfigError", 'secret "hub" not found'),
        ("ContainerCreating", ""),
    ],
)
@pytest.mark.parametrize("worker", ["training-0", "coordinator", "inference-0"])
def test_a_pod_that_cannot_start_gives_back_the_gpus_of_all_after_the_stated_time(
    worker: str, reason: str, message: str
) -> None:
    cluster = begun()
    since = rfc3339(cluster.now)
    cluster.wait_with(worker, reason, message)
    cluster.run(*(item for item in cluster.workers if item != worker))
    cluster.later(LIMIT - 1)
    cluster.turn()
    assert len(cluster.pods) == 6
    cluster.later(1)
    cluster.turn()
    cluster.turn()
    assert cluster.pods == {}
    assert cluster.phase == "Released"
    assert f"job-{worker} has a node since {since} and cannot start ({reason}" in cluster.running_message
    assert message in cluster.running_message
    assert f"the next attempt (2) is at {cluster.job['status']['release']['until']}" in cluster.running_message
    assert cluster.events.count("Released") == 1
    assert cluster.job["status"]["restarts"]["failures"] == 0


def test_it_tries_again_ever_later_and_begins_anew_when_it_was_at_work() -> None:
    cluster = kept_from_starting()
    waits = []
    for _ in range(8):
        cluster.later(LIMIT)
        cluster.turn()
        cluster.turn()
        assert cluster.pods == {}
        began = cluster.now
        while not cluster.pods:
            left = cluster.plan().requeue_after
            assert left is not None
            assert left > 0
            cluster.later(left)
            cluster.turn()
        waits.append((cluster.now - began).total_seconds())
        cluster.wait_with("training-0", *PULL)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert cluster.job["status"]["release"]["attempts"] == 8
    cluster.run()
    cluster.later(11)
    cluster.read()
    cluster.settle()
    assert cluster.phase == "Running"
    assert "release" not in cluster.job["status"]


def test_an_edit_is_tried_at_once() -> None:
    cluster = kept_from_starting()
    cluster.later(LIMIT)
    cluster.turn()
    cluster.turn()
    assert cluster.pods == {}
    pod_spec = cluster.job["spec"]["training"].setdefault("template", {}).setdefault("spec", {})
    [container] = pod_spec.setdefault("containers", [{"name": "worker"}])
    container["image"] = "registry/worker:v1"
    cluster.job["metadata"]["generation"] = 2
    cluster.turn()
    assert len(cluster.pods) == 6


def test_an_operator_that_dies_while_pods_end_goes_on() -> None:
    cluster = kept_from_starting()
    cluster.later(LIMIT)
    cluster.carry_out(cluster.plan(), only_status=True)
    assert len(cluster.pods) == 6
    cluster.turn()
    cluster.turn()
    assert cluster.pods == {}
    assert cluster.job["status"]["release"]["attempts"] == 1
    assert cluster.job["status"]["restarts"]["disruptions"] == 0


def test_zero_is_never() -> None:
    cluster = kept_from_starting(runPolicy={"podStartTimeoutSeconds": 0})
    cluster.later(10 * 24 * 3600)
    cluster.turn()
    assert len(cluster.pods) == 6
    assert "cannot get the image" in cluster.running_message


def test_a_pod_that_an_iteration_can_do_without_is_replaced_alone_and_backs_off() -> None:
    cluster = SimulatedCluster().begin()
    before = cluster.pods["job-generation-1"]["metadata"]["uid"]
    cluster.pods["job-generation-1"]["status"] = {"phase": "Pending"}
    cluster.wait_with("generation-1", *PULL)
    cluster.later(LIMIT)
    cluster.read()
    cluster.turn()
    assert len(cluster.pods) == 6
    assert cluster.pods["job-generation-1"]["metadata"]["uid"] != before
    assert [item["pod"] for item in cluster.job["status"]["restarts"]["backOff"]] == ["job-generation-1"]
    assert cluster.phase == "Running"


def test_workers_that_run_and_never_reach_their_coordinator_give_their_gpus_back() -> None:
    cluster = begun()
    cluster.run()
    for _ in range(16):
        cluster.later(61)
        cluster.read("Starting", iteration=0, working={}, waiting_for=("training-0 to register (70 s)", "more"))
        cluster.settle()
    assert cluster.phase == "Released"
    assert "and the coordinator still waits for training-0 to register. All pods ended" in cluster.running_message


def test_the_deadline_of_a_job_goes_on_while_it_holds_nothing() -> None:
    cluster = kept_from_starting(runPolicy={"activeDeadlineSeconds": 2000})
    cluster.later(LIMIT)
    cluster.turn()
    cluster.turn()
    assert cluster.phase == "Released"
    cluster.later(300)
    cluster.turn()
    assert cluster.condition("Failed")["reason"] == "DeadlineExceeded"


def test_the_reservation_of_a_queue_is_given_back_and_asked_for_again() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.settle()
    cluster.wait_with("training-0", *PULL)
    cluster.run(*(worker for worker in cluster.workers if worker != "training-0"))
    assert WORKLOAD_KEY in cluster.applied
    cluster.later(LIMIT)
    cluster.turn()
    cluster.turn()
    assert cluster.pods == {}
    assert cluster.phase == "Released"
    assert WORKLOAD_KEY not in cluster.applied, "Kueue frees the quota with it"
    cluster.later(60)
    cluster.settle()
    assert cluster.phase == "Queued"
    assert WORKLOAD_KEY in cluster.applied
    assert cluster.pods == {}
