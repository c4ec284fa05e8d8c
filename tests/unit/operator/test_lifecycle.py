"""The life of a job as its user sees it: conditions, pods and times, from apply to deletion."""

import pytest
from tests.support.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.phases import MAX_PODS_PER_RECONCILE

EVERYBODY = ["coordinator", "generation-0", "generation-1", "inference-0", "training-0", "training-1"]


def test_an_applied_job_gets_all_conditions_certificates_objects_and_pods() -> None:
    world = SimulatedCluster()
    first = world.plan()
    assert first.issue_certificates
    assert not [each for each in first.apply if each["kind"] == "Pod"], "pods would wait for the Secret"
    world.settle()
    assert world.workers == EVERYBODY
    assert {kind for kind, _ in world.applied} == {"ConfigMap", "Service", "NetworkPolicy"}
    status = world.job["status"]
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "Planned": "True",
        "Admitted": "True",
        "Running": "False",
        "Resizing": "False",
        "Restarting": "False",
        "Suspended": "False",
        "Complete": "False",
        "Failed": "False",
    }
    assert world.phase == "Starting"
    assert status["startTime"] == "2026-08-22T10:00:00Z"
    assert status["algorithm"] == "ppo"
    assert world.events == ["PlanMade", "Starting"]


def test_a_running_job_shows_its_progress() -> None:
    world = SimulatedCluster().begin()
    assert world.condition("Running") | {"lastTransitionTime": ""} == {
        "type": "Running",
        "status": "True",
        "reason": "Running",
        "message": "iteration 4 of 100: generating",
        "lastTransitionTime": "",
        "observedGeneration": 1,
    }
    assert world.job["status"]["progress"]["summary"] == "3/100"
    ready = {each["name"]: each["ready"] for each in world.job["status"]["groups"]}
    assert ready == {"coordinator": 1, "generation": 2, "inference": 1, "training": 2}


def test_progress_is_written_at_most_every_ten_seconds_and_not_when_there_is_none() -> None:
    world = SimulatedCluster().begin()
    world.read(iteration=4)
    plan = world.plan()
    assert plan.idle
    assert plan.requeue_after is not None
    assert 0 < plan.requeue_after <= 10
    world.later(plan.requeue_after)
    world.settle()
    assert world.job["status"]["progress"]["summary"] == "4/100"
    world.later(30)
    world.read(iteration=4)
    assert world.plan().idle, "only the time of the reading is new"


def test_numbers_that_are_not_finite_never_reach_the_api_server() -> None:
    world = SimulatedCluster().begin()
    world.later(11)
    world.read(iteration=5, metrics={"reward": float("nan"), "kl": float("inf"), "samples_per_second": 12.3456789})
    world.settle()
    progress = world.job["status"]["progress"]
    assert "reward" not in progress
    assert "kl" not in progress
    assert progress["samplesPerSecond"] == 12.3457


def test_skipped_steps_are_counted_and_told_once() -> None:
    world = SimulatedCluster().begin()
    for iteration, skipped in enumerate([0.0, 2.0, 2.0, 3.0]):
        world.later(11)
        world.read(iteration=iteration, metrics={"nonfinite_steps": skipped})
        world.settle()
    assert world.job["status"]["progress"]["nonFiniteSteps"] == 3
    assert world.events.count("StepsSkipped") == 2


def test_a_manifest_the_api_server_could_not_check_is_refused_in_words_and_nothing_is_made() -> None:
    world = SimulatedCluster(generation={"replicas": 2, "template": {"spec": {"hostNetwork": True}}})
    world.settle()
    assert world.workers == []
    planned = world.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidManifest")
    assert "spec.generation.template.spec.hostNetwork" in planned["message"]
    assert "must be false or left out" in planned["message"]
    world.job["spec"]["generation"] = {"replicas": 2}
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.workers == EVERYBODY
    assert world.condition("Planned")["observedGeneration"] == 2


def test_what_this_version_cannot_do_is_said_so() -> None:
    world = SimulatedCluster(generation={"replicas": 2, "engine": "vllm", "gpusPerReplica": 1})
    world.settle()
    assert world.condition("Planned")["reason"] == "NotAvailableInThisVersion"
    assert "use torch" in world.condition("Planned")["message"]
    assert world.workers == []


def test_a_live_job_goes_on_when_its_template_becomes_invalid() -> None:
    world = SimulatedCluster().begin()
    world.job["spec"]["training"]["template"] = {"spec": {"hostPID": True}}
    world.settle()
    assert world.workers == EVERYBODY
    assert world.condition("Planned")["status"] == "False"
    assert world.phase == "Running"


def test_the_coordinators_success_completes_the_job_and_frees_the_workers() -> None:
    world = SimulatedCluster().begin()
    world.later(60)
    world.end("generation-0", 0)
    world.end("coordinator", 0)
    world.settle()
    assert world.condition("Complete")["status"] == "True"
    assert {each["restarts"] for each in world.job["status"]["groups"]} == {0}, "nothing was replaced"
    assert world.phase == "Complete"
    assert world.job["status"]["completionTime"] == "2026-08-22T10:01:11Z"
    assert world.job["status"]["progress"]["summary"] == "100/100"
    world.finish_deletions()
    assert world.workers == ["coordinator", "generation-0"], "what has ended stays for its logs"
    assert world.settle().idle
    world.pods.clear()
    assert world.settle().idle, "a finished job is never started again"


def test_a_job_past_its_deadline_fails() -> None:
    world = SimulatedCluster(runPolicy={"activeDeadlineSeconds": 100, "backoffLimit": 2}).begin()
    assert (world.plan().requeue_after or 1e9) <= 100
    world.later(100)
    world.settle()
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    world.finish_deletions()
    assert world.workers == []


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = SimulatedCluster(runPolicy={"ttlSecondsAfterFinished": 60}).begin()
    world.end("coordinator", 0)
    left = world.settle().requeue_after
    assert left is not None
    assert left <= 60
    world.later(left)
    assert world.plan().delete_job


def test_a_job_under_deletion_is_left_alone() -> None:
    world = SimulatedCluster().begin()
    world.job["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:00Z"
    world.pods.clear()
    assert world.plan().idle


def test_a_suspension_ends_the_coordinator_before_the_ranks_that_its_checkpoint_needs() -> None:
    world = SimulatedCluster().begin()
    world.job["spec"]["suspend"] = True
    world.settle()
    leaving = [name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"]]
    assert leaving == ["job-coordinator"]
    assert world.phase == "Checkpointing"
    world.finish_deletions()
    world.settle()
    assert world.condition("Suspended")["status"] == "False"
    world.finish_deletions()
    world.settle()
    assert world.workers == []
    assert world.condition("Suspended")["status"] == "True"
    assert "goes on from its last checkpoint" in world.condition("Suspended")["message"]
    assert world.phase == "Suspended"
    assert "startTime" not in world.job["status"], "the deadline is counted anew"
    world.later(3600)
    assert world.plan() == world.settle()
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.workers == EVERYBODY
    restarts = world.job["status"]["restarts"]
    assert (restarts["failures"], restarts["disruptions"]) == (0, 0)


def test_a_job_that_is_suspended_from_the_start_makes_nothing() -> None:
    world = SimulatedCluster(suspend=True)
    world.settle()
    assert world.workers == []
    assert world.condition("Suspended")["status"] == "True"


def test_resuming_while_the_last_pods_still_end_counts_nothing() -> None:
    world = SimulatedCluster().begin()
    world.job["spec"]["suspend"] = True
    world.settle()
    world.later(5)
    world.job["spec"]["suspend"] = False
    world.settle()
    world.finish_deletions()
    world.settle()
    assert world.workers == EVERYBODY
    assert world.job["status"]["restarts"]["failures"] == 0


@pytest.mark.parametrize("group", ["generation", "inference"])
def test_a_group_grows_and_shrinks_while_the_job_runs(group: str) -> None:
    world = SimulatedCluster().begin()
    before = world.workers
    count = len([each for each in before if each.startswith(group)])
    world.job["spec"][group]["replicas"] = count + 2
    world.settle()
    assert [each for each in world.workers if each not in before] == [f"{group}-{count}", f"{group}-{count + 1}"]
    resizing = world.condition("Resizing")
    assert (resizing["status"], resizing["reason"]) == ("True", "ScalingUp")
    assert world.told == [{group: count + 2}], "the coordinator lets them in"
    world.run()
    world.later(11)
    world.read(working={"generation": 4, "inference": 3, "training": 2})
    world.settle()
    assert world.condition("Resizing")["reason"] == "AtDesiredSize"
    world.job["spec"][group]["replicas"] = 1
    world.settle()
    leaving = sorted(name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"])
    assert leaving == [f"job-{group}-{index}" for index in range(1, count + 2)]
    assert world.condition("Resizing")["reason"] == "ScalingDown"
    world.finish_deletions()
    world.settle()
    assert [each for each in world.workers if each.startswith(group)] == [f"{group}-0"]
    assert world.condition("Resizing")["status"] == "False"
    restarts = world.job["status"]["restarts"]
    assert (restarts["failures"], restarts["disruptions"]) == (0, 0)


def test_growing_again_before_the_leaving_pods_are_gone_counts_no_disruption() -> None:
    world = SimulatedCluster(generation={"replicas": 3}).begin()
    world.job["spec"]["generation"]["replicas"] = 1
    world.settle()
    world.job["spec"]["generation"]["replicas"] = 3
    world.settle()
    world.finish_deletions()
    world.settle()
    assert [each for each in world.workers if each.startswith("generation")] == [f"generation-{i}" for i in range(3)]
    assert world.job["status"]["restarts"]["disruptions"] == 0


def test_a_big_job_is_made_in_turns_so_that_small_ones_are_served_between() -> None:
    world = SimulatedCluster(generation={"replicas": 400})
    world.carry_out(world.plan())
    plan = world.plan()
    assert len([each for each in plan.apply if each["kind"] == "Pod"]) == MAX_PODS_PER_RECONCILE < 400
    assert plan.requeue_after == 0
    world.settle()
    assert len(world.pods) == 404


def test_a_resize_goes_on_until_the_group_that_grows_is_there_though_another_shrank_meanwhile() -> None:
    world = SimulatedCluster().begin()
    world.job["spec"]["generation"]["replicas"] = 1
    world.job["spec"]["inference"]["replicas"] += 1
    world.settle()
    assert world.condition("Resizing")["reason"] == "ScalingDown"
    world.finish_deletions()
    world.settle()
    assert world.condition("Resizing")["reason"] == "ScalingUp"
    world.run()
    world.later(11)
    world.read(working={"generation": 1, "inference": 2, "training": 2})
    world.settle()
    assert world.condition("Resizing")["status"] == "False"
