"""A job that asked for it is deleted after a last checkpoint, and never waits for ever."""

from tests.support.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.timestamps import rfc3339

SAVE = {"path": "/checkpoints", "onDeletion": "Save", "deletionDeadlineSeconds": 120}


def held(world: SimulatedCluster) -> bool:
    return world.job["metadata"].get("finalizers") == ["rlhf.dev/checkpoint"]


def delete(world: SimulatedCluster) -> None:
    world.job["metadata"]["deletionTimestamp"] = rfc3339(world.now)


def leaving(world: SimulatedCluster) -> list[str]:
    return sorted(name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"])


def test_without_being_asked_for_there_is_no_finalizer() -> None:
    world = SimulatedCluster(checkpoints={"path": "/checkpoints"}).begin()
    assert "finalizers" not in world.job["metadata"]
    delete(world)
    assert world.plan().idle


def test_a_deletion_waits_for_the_coordinators_last_checkpoint() -> None:
    world = SimulatedCluster(checkpoints=SAVE).begin()
    assert held(world)
    delete(world)
    left = world.settle().requeue_after
    assert left == 120
    assert leaving(world) == ["job-coordinator"], "the checkpoint needs the ranks"
    running = world.condition("Running")
    assert running["reason"] == "Checkpointing"
    assert running["message"].startswith("the job is being deleted; the coordinator saves a checkpoint, until ")
    assert held(world)
    world.finish_deletions()
    world.settle()
    assert not held(world)
    assert sorted(world.pods) == [
        "job-generation-0", "job-generation-1", "job-inference-0", "job-training-0", "job-training-1"
    ], "they are the garbage collector's"  # fmt: skip


def test_a_checkpoint_that_takes_too_long_does_not_hold_up_the_deletion() -> None:
    world = SimulatedCluster(checkpoints=SAVE).begin()
    delete(world)
    world.settle()
    world.later(120)
    plan = world.plan()
    assert [each.reason for each in plan.events] == ["CheckpointMissed"]
    world.carry_out(plan)
    assert not held(world)
    assert world.plan().idle


def test_nothing_is_waited_for_when_there_is_nothing_to_save() -> None:
    suspended = SimulatedCluster(checkpoints=SAVE, suspend=True)
    suspended.settle()
    assert held(suspended)
    delete(suspended)
    suspended.settle()
    assert not held(suspended)

    finished = SimulatedCluster(checkpoints=SAVE).begin()
    finished.end("coordinator", 0)
    finished.settle()
    assert not held(finished), "a finished job is not held"


def test_a_manifest_that_can_not_be_read_any_more_changes_nothing_about_the_deletion() -> None:
    world = SimulatedCluster(checkpoints=SAVE).begin()
    world.job["spec"]["iterations"] = -1
    delete(world)
    world.settle()
    assert leaving(world) == ["job-coordinator"]
    world.finish_deletions()
    world.settle()
    assert not held(world)


def test_turning_it_off_takes_the_finalizer_away() -> None:
    world = SimulatedCluster(checkpoints=SAVE).begin()
    world.job["spec"]["checkpoints"] = SAVE | {"onDeletion": "Disabled"}
    world.settle()
    assert not held(world)


def test_an_expired_job_is_let_go_and_deleted() -> None:
    world = SimulatedCluster(checkpoints=SAVE, runPolicy={"ttlSecondsAfterFinished": 0}).begin()
    world.end("coordinator", 0)
    world.carry_out(world.plan())
    plan = world.plan()
    assert plan.delete_job
    assert plan.finalizer is False
