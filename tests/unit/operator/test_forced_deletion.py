"""A coordinator on a node that does not answer: never forced unasked, and only where its journal's lock is seen."""

from typing import Any

import pytest
from tests.support.simulated_cluster import SimulatedCluster

from rlhf_api import control_pb2 as pb
from rlhf_operator.coordinator_client import reading_of

FORCED = {"checkpoints": {"path": "/checkpoints"}, "runPolicy": {"forceCoordinatorAfterSeconds": 120}}


def lost_node(*, shared: bool = True, doubt: str = "", ready: bool = False, **spec: Any) -> SimulatedCluster:
    """The coordinator's node went away after it was read for the last time; its taint deletes the pod."""
    world = SimulatedCluster(**spec).begin()
    world.later(10)
    world.read(lock_shared=shared, lock_doubt=doubt)
    world.settle()
    if not ready:
        world.pods["job-coordinator"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.ask_deletion("job-coordinator", grace=300)
    world.reading = None  # the operator is another one by now
    world.settle()
    return world


def forced(world: SimulatedCluster) -> list[str]:
    return [each.name for each in world.plan().delete if each.force]


def told(world: SimulatedCluster) -> str:
    return str(world.condition("Running")["message"])


def test_it_is_forced_after_its_grace_and_the_time_of_the_manifest() -> None:
    world = lost_node(**FORCED)
    assert world.job["status"]["journalLockShared"] is True
    world.later(340)
    assert "it is deleted by force at 2026-08-22T10:" in told_later(world)
    world.later(79)
    assert forced(world) == []
    look = world.plan().requeue_after
    assert look is not None
    assert look <= 3
    world.later(2)
    assert forced(world) == ["job-coordinator"]
    [event] = [each for each in world.plan().events if each.reason == "CoordinatorForced"]
    assert "spec.runPolicy.forceCoordinatorAfterSeconds" in event.message
    world.settle()
    world.run()
    assert world.pods["job-coordinator"]["metadata"].get("deletionTimestamp") is None, "it is made again"
    assert world.job["status"]["restarts"]["failures"] == 0


def told_later(world: SimulatedCluster) -> str:
    world.settle()
    return told(world)


def test_it_is_never_forced_unasked_and_its_user_is_told_what_to_do() -> None:
    world = lost_node(checkpoints={"path": "/checkpoints"})
    world.later(86400)
    assert forced(world) == []
    assert "the node of job-coordinator does not carry out its deletion: when that node is gone for good, `kubectl" in (
        told_later(world)
    )
    assert "journalLockShared" not in world.job["status"]


@pytest.mark.parametrize("doubt", ["/checkpoints/run is on fuse.s3fs, of which it is not known that", ""])
def test_it_is_not_forced_where_its_lock_may_not_be_seen_or_it_never_said_so(doubt: str) -> None:
    world = lost_node(shared=False, doubt=doubt, **FORCED)
    assert world.job["status"]["journalLockShared"] is False
    world.later(86400)
    assert forced(world) == []
    assert "forceCoordinatorAfterSeconds is not followed, as other nodes may not see its journal's lock" in (
        told_later(world)
    )


def test_a_node_that_answers_is_left_to_end_it() -> None:
    world = lost_node(ready=True, **FORCED)
    world.later(86400)
    assert forced(world) == []


def test_the_reply_of_an_earlier_version_says_nothing_of_the_lock() -> None:
    now = SimulatedCluster().now
    assert not reading_of(pb.JobStatus(), now).lock_shared
    said = reading_of(pb.JobStatus(journal_lock_shared=True), now)
    assert (said.lock_shared, said.lock_doubt) == (True, "")
