"""Waiting for capacity ends nothing and says so; pods that cannot start do not hold the GPUs of the others for ever."""

from typing import Any

import pytest
from tests.support.simulated_cluster import SimulatedCluster
from tests.unit.operator.test_gang_queue import PLACE, QueuedCluster

from rlhf_operator.reconcile.timestamps import rfc3339

PULL = ("ImagePullBackOff", 'Back-off pulling image "registry/worker:v0"')
LIMIT = 1800.0
NO_GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def begun(**spec: Any) -> SimulatedCluster:
    world = SimulatedCluster(**spec)
    world.settle()
    return world


def turn(world: SimulatedCluster) -> None:
    world.settle()
    world.finish_deletions()
    world.settle()


def told(world: SimulatedCluster) -> str:
    return str(world.condition("Running")["message"])


def kept_from_starting(worker: str = "training-0", **spec: Any) -> SimulatedCluster:
    """Everybody runs but one."""
    world = begun(**spec)
    world.wait_with(worker, *PULL)
    world.run(*(each for each in world.workers if each != worker))
    world.read("Starting", iteration=0, working={}, waiting_for=(f"{worker} to register (3 s)",))
    return world


def test_an_hour_without_gpus_ends_nothing_and_is_told_with_its_beginning() -> None:
    world = begun()
    world.run("coordinator", "generation-0", "generation-1", "inference-0", "training-1")
    since = rfc3339(world.now)
    world.cannot_schedule("training-0", NO_GPUS)
    world.pods["job-training-0"]["status"]["conditions"][0]["lastTransitionTime"] = since
    for _ in range(24):
        world.later(300)
        world.read("Starting", iteration=0, working={}, waiting_for=("training-0 to register (3 s)",))
        world.settle()
    assert world.phase == "Unschedulable"
    assert f"no node can take job-training-0 since {since} (0/3 nodes are available: 3 Insufficient" in told(world)
    assert world.condition("Failed")["status"] == "False"
    assert world.job["status"]["restarts"]["failures"] == 0
    assert len(world.pods) == 6, "a gang or a queue is what keeps the others from holding their GPUs"


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
    world = begun()
    since = rfc3339(world.now)
    world.wait_with(worker, reason, message)
    world.run(*(each for each in world.workers if each != worker))
    world.later(LIMIT - 1)
    turn(world)
    assert len(world.pods) == 6
    world.later(1)
    turn(world)
    turn(world)
    assert world.pods == {}
    assert world.phase == "Released"
    assert f"job-{worker} has a node since {since} and is kept from starting ({reason}" in told(world)
    assert message in told(world)
    assert f"tried again at {world.job['status']['release']['until']} (attempt 2)" in told(world)
    assert world.events.count("Released") == 1
    assert world.job["status"]["restarts"]["failures"] == 0


def test_it_tries_again_ever_later_and_begins_anew_when_it_was_at_work() -> None:
    world = kept_from_starting()
    waits = []
    for _ in range(8):
        world.later(LIMIT)
        turn(world)
        turn(world)
        assert world.pods == {}
        began = world.now
        while not world.pods:
            left = world.plan().requeue_after
            assert left is not None
            assert left > 0
            world.later(left)
            turn(world)
        waits.append((world.now - began).total_seconds())
        world.wait_with("training-0", *PULL)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert world.job["status"]["release"]["attempts"] == 8
    world.run()
    world.later(11)
    world.read()
    world.settle()
    assert world.phase == "Running"
    assert "release" not in world.job["status"]


def test_an_edit_is_tried_at_once() -> None:
    world = kept_from_starting()
    world.later(LIMIT)
    turn(world)
    turn(world)
    assert world.pods == {}
    pod_spec = world.job["spec"]["training"].setdefault("template", {}).setdefault("spec", {})
    [container] = pod_spec.setdefault("containers", [{"name": "worker"}])
    container["image"] = "registry/worker:v1"
    world.job["metadata"]["generation"] = 2
    turn(world)
    assert len(world.pods) == 6


def test_an_operator_that_dies_while_pods_end_goes_on() -> None:
    world = kept_from_starting()
    world.later(LIMIT)
    world.carry_out(world.plan(), only_status=True)
    assert len(world.pods) == 6
    turn(world)
    turn(world)
    assert world.pods == {}
    assert world.job["status"]["release"]["attempts"] == 1
    assert world.job["status"]["restarts"]["disruptions"] == 0


def test_zero_is_never() -> None:
    world = kept_from_starting(runPolicy={"podStartTimeoutSeconds": 0})
    world.later(10 * 24 * 3600)
    turn(world)
    assert len(world.pods) == 6
    assert "cannot get the image" in told(world)


def test_a_pod_that_an_iteration_can_do_without_is_replaced_alone_and_backs_off() -> None:
    world = SimulatedCluster().begin()
    before = world.pods["job-generation-1"]["metadata"]["uid"]
    world.pods["job-generation-1"]["status"] = {"phase": "Pending"}
    world.wait_with("generation-1", *PULL)
    world.later(LIMIT)
    world.read()
    turn(world)
    assert len(world.pods) == 6
    assert world.pods["job-generation-1"]["metadata"]["uid"] != before
    assert [each["pod"] for each in world.job["status"]["restarts"]["backOff"]] == ["job-generation-1"]
    assert world.phase == "Running"


def test_workers_that_run_and_never_reach_their_coordinator_give_their_gpus_back() -> None:
    world = begun()
    world.run()
    for _ in range(16):
        world.later(61)
        world.read("Starting", iteration=0, working={}, waiting_for=("training-0 to register (70 s)", "more"))
        world.settle()
    assert world.phase == "Released"
    assert "and the coordinator still waits for training-0 to register. All pods are ended" in told(world)


def test_the_deadline_of_a_job_goes_on_while_it_holds_nothing() -> None:
    world = kept_from_starting(runPolicy={"activeDeadlineSeconds": 2000})
    world.later(LIMIT)
    turn(world)
    turn(world)
    assert world.phase == "Released"
    world.later(300)
    turn(world)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"


def test_the_reservation_of_a_queue_is_given_back_and_asked_for_again() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.settle()
    world.wait_with("training-0", *PULL)
    world.run(*(each for each in world.workers if each != "training-0"))
    assert PLACE in world.applied
    world.later(LIMIT)
    turn(world)
    turn(world)
    assert world.pods == {}
    assert world.phase == "Released"
    assert PLACE not in world.applied, "Kueue frees the quota with it"
    world.later(60)
    world.settle()
    assert world.phase == "Queued"
    assert PLACE in world.applied
    assert world.pods == {}
