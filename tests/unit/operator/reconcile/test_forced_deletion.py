"""A coordinator on an unresponsive node is forced only on request, and only if its journal's lock is visible."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import Json, SimulatedCluster

from rlhf_common import control_pb2 as pb
from rlhf_operator.coordinator_client import reading_of

FORCED: Json = {"checkpoints": {"path": "/checkpoints"}, "runPolicy": {"forceCoordinatorAfterSeconds": 120}}


def lost_node(*, shared: bool = True, doubt: str = "", ready: bool = False, **spec: Any) -> SimulatedCluster:
    """The coordinator's node disappeared after its last read; its taint deletes the pod."""
    cluster = SimulatedCluster(**spec).begin()
    cluster.later(10)
    cluster.read(lock_shared=shared, lock_doubt=doubt)
    cluster.settle()
    if not ready:
        cluster.pods["job-coordinator"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.ask_deletion("job-coordinator", grace=300)
    cluster.reading = None  # the operator is another one by now
    cluster.settle()
    return cluster


def forced(cluster: SimulatedCluster) -> list[str]:
    return [item.name for item in cluster.plan().delete if item.force]


def test_it_is_forced_after_its_grace_and_the_time_of_the_manifest() -> None:
    cluster = lost_node(**FORCED)
    assert cluster.job["status"]["journalLockShared"] is True
    cluster.later(340)
    assert "it is deleted by force at 2026-08-22T10:" in told_later(cluster)
    cluster.later(79)
    assert forced(cluster) == []
    look = cluster.plan().requeue_after
    assert look is not None
    assert look <= 3
    cluster.later(2)
    assert forced(cluster) == ["job-coordinator"]
    [event] = [event for event in cluster.plan().events if event.reason == "CoordinatorForced"]
    assert "spec.runPolicy.forceCoordinatorAfterSeconds" in event.message
    cluster.settle()
    cluster.run()
    assert cluster.pods["job-coordinator"]["metadata"].get("deletionTimestamp") is None, "it is made again"
    assert cluster.job["status"]["restarts"]["failures"] == 0


def told_later(cluster: SimulatedCluster) -> str:
    cluster.settle()
    return cluster.running_message


def test_it_is_never_forced_unasked_and_its_user_is_told_what_to_do() -> None:
    cluster = lost_node(checkpoints={"path": "/checkpoints"})
    cluster.later(86400)
    assert forced(cluster) == []
    assert (
        "the node of job-coordinator does not carry out its deletion: if that node is gone permanently, `kubectl"
        in (told_later(cluster))
    )
    assert "journalLockShared" not in cluster.job["status"]


@pytest.mark.parametrize("spec", [{"checkpoints": {"path": "/checkpoints"}}, FORCED])
def test_its_node_is_named_as_soon_as_it_is_late_though_nothing_else_happens(spec: Json) -> None:
    cluster = lost_node(**spec)
    cluster.later(100)
    cluster.settle()
    look = cluster.plan().requeue_after
    assert look is not None
    assert look <= 300 + 30 - 100 + 2
    cluster.later(look)
    assert "the node of job-coordinator does not carry out its deletion" in told_later(cluster)


@pytest.mark.parametrize("doubt", ["/checkpoints/run is on fuse.s3fs, whose locks other nodes may not see", ""])
def test_it_is_not_forced_where_its_lock_may_not_be_seen_or_it_never_said_so(doubt: str) -> None:
    cluster = lost_node(shared=False, doubt=doubt, **FORCED)
    assert cluster.job["status"]["journalLockShared"] is False
    cluster.later(86400)
    assert forced(cluster) == []
    assert "forceCoordinatorAfterSeconds is ignored, because other nodes may not see its journal's lock" in (
        told_later(cluster)
    )


def test_a_node_that_answers_is_left_to_end_it() -> None:
    cluster = lost_node(ready=True, **FORCED)
    cluster.later(86400)
    assert forced(cluster) == []


def test_the_reply_of_an_earlier_version_says_nothing_of_the_lock() -> None:
    now = SimulatedCluster().now
    assert not reading_of(pb.JobStatus(), now).lock_shared
    said = reading_of(pb.JobStatus(journal_lock_shared=True), now)
    assert (said.lock_shared, said.lock_doubt) == (True, "")
