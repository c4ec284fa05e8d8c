"""A job with the finalizer is deleted after a last checkpoint, and never waits forever."""

from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.timestamps import rfc3339

SAVE = {"path": "/checkpoints", "onDeletion": "Save", "deletionDeadlineSeconds": 120}


def has_finalizer(cluster: SimulatedCluster) -> bool:
    return bool(cluster.job["metadata"].get("finalizers") == ["rlhf.dev/checkpoint"])


def delete(cluster: SimulatedCluster) -> None:
    cluster.job["metadata"]["deletionTimestamp"] = rfc3339(cluster.now)


def leaving(cluster: SimulatedCluster) -> list[str]:
    return sorted(name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"])


def test_without_being_asked_for_there_is_no_finalizer() -> None:
    cluster = SimulatedCluster(checkpoints={"path": "/checkpoints"}).begin()
    assert "finalizers" not in cluster.job["metadata"]
    delete(cluster)
    assert cluster.plan().idle


def test_a_deletion_waits_for_the_coordinators_last_checkpoint() -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    assert has_finalizer(cluster)
    delete(cluster)
    left = cluster.settle().requeue_after
    assert left == 120
    assert leaving(cluster) == ["job-coordinator"], "the checkpoint needs the ranks"
    running = cluster.condition("Running")
    assert running["reason"] == "Checkpointing"
    assert running["message"].startswith("the job is being deleted; the coordinator saves a checkpoint, until ")
    assert has_finalizer(cluster)
    cluster.finish_deletions()
    cluster.settle()
    assert not has_finalizer(cluster)
    assert sorted(cluster.pods) == [
        "job-generation-0", "job-generation-1", "job-inference-0", "job-training-0", "job-training-1"
    ], "they are the garbage collector's"  # fmt: skip


def test_a_checkpoint_that_takes_too_long_does_not_hold_up_the_deletion() -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    delete(cluster)
    cluster.settle()
    cluster.later(120)
    plan = cluster.plan()
    assert [event.reason for event in plan.events] == ["CheckpointMissed"]
    cluster.carry_out(plan)
    assert not has_finalizer(cluster)
    assert cluster.plan().idle


def test_nothing_is_waited_for_when_there_is_nothing_to_save() -> None:
    suspended = SimulatedCluster(checkpoints=SAVE, suspend=True)
    suspended.settle()
    assert has_finalizer(suspended)
    delete(suspended)
    suspended.settle()
    assert not has_finalizer(suspended)

    finished = SimulatedCluster(checkpoints=SAVE).begin()
    finished.end("coordinator", 0)
    finished.settle()
    assert not has_finalizer(finished), "a finished job is not held"


def test_a_manifest_that_can_not_be_read_any_more_changes_nothing_about_the_deletion() -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    cluster.job["spec"]["iterations"] = -1
    delete(cluster)
    cluster.settle()
    assert leaving(cluster) == ["job-coordinator"]
    cluster.finish_deletions()
    cluster.settle()
    assert not has_finalizer(cluster)


def test_turning_it_off_takes_the_finalizer_away() -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    cluster.job["spec"]["checkpoints"] = SAVE | {"onDeletion": "Disabled"}
    cluster.settle()
    assert not has_finalizer(cluster)


def test_an_expired_job_is_let_go_and_deleted() -> None:
    cluster = SimulatedCluster(checkpoints=SAVE, runPolicy={"ttlSecondsAfterFinished": 0}).begin()
    cluster.end("coordinator", 0)
    cluster.carry_out(cluster.plan())
    plan = cluster.plan()
    assert plan.delete_job
    assert plan.finalizer is False
