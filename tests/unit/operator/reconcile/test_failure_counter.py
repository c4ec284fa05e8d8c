"""Failures are counted once, in the right category, with messages that a user can act on."""

import json

import pytest
from tests.support.operator.simulated_cluster import EVERYBODY, Json, SimulatedCluster


def test_a_failing_worker_is_counted_once_however_often_it_is_looked_at() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("generation-1", 1, message="Traceback\nValueError: no")
    cluster.settle()
    cluster.later(60)
    cluster.settle()
    assert cluster.counts == (1, 0)
    assert cluster.job["status"]["restarts"]["lastReason"] == "job-generation-1: exit code 1: ValueError: no"
    assert cluster.events[-1] == "WorkerFailed"
    cluster.end("generation-1", 1)
    cluster.settle()
    assert cluster.counts == (2, 0)


def test_an_operator_that_dies_after_the_status_is_written_counts_nothing_twice() -> None:
    cluster = SimulatedCluster().begin()
    cluster.evict("inference-0")
    plan = cluster.plan()
    assert plan.delete
    cluster.carry_out(plan, only_status=True)
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.counts == (0, 1)
    assert cluster.workers == EVERYBODY


def test_a_pod_that_goes_while_the_rest_is_observed_is_counted_once() -> None:
    cluster = SimulatedCluster().begin()
    cluster.ask_deletion("job-inference-0")
    plan = cluster.plan(gone=["job-inference-0"])
    assert plan.status is not None
    assert plan.status["restarts"]["disruptions"] == 1
    assert [event.reason for event in plan.events].count("Disrupted") == 1


def test_a_request_to_be_restarted_is_free_and_does_not_wait_for_the_kubelets_back_off() -> None:
    cluster = SimulatedCluster().begin()
    for _ in range(5):
        cluster.end("training-1", 75, restarted=False)
        cluster.settle()
        assert cluster.finish_deletions() == ["job-training-1"]
        cluster.settle()
        cluster.run()
        cluster.later(300)
        cluster.read()
        cluster.settle()
    assert cluster.counts == (0, 0)
    assert cluster.phase == "Running"
    [training] = [group for group in cluster.job["status"]["groups"] if group["name"] == "training"]
    assert training["restarts"] == 5


def test_workers_that_end_well_before_the_coordinator_is_seen_to_are_no_restarts() -> None:
    cluster = SimulatedCluster().begin()
    for worker in ("training-0", "training-1", "generation-0"):
        cluster.end(worker, 0)
        cluster.settle()
    assert {group["restarts"] for group in cluster.job["status"]["groups"]} == {0}
    assert cluster.counts == (0, 0)


def test_more_failures_than_the_limit_fail_the_job_with_the_last_reason() -> None:
    cluster = SimulatedCluster().begin()
    for number in range(3):
        assert cluster.condition("Failed")["status"] == "False"
        cluster.end("generation-0", 137, reason="OOMKilled")
        cluster.settle()
        assert cluster.counts == (number + 1, 0)
    killed = {group["name"]: group["outOfMemory"] for group in cluster.job["status"]["groups"]}
    assert killed == {"coordinator": 0, "generation": 3, "inference": 0, "training": 0}
    failed = cluster.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "BackoffLimitExceeded")
    assert "raise resources.limits.memory" in failed["message"]
    assert "completionTime" in cluster.job["status"]
    cluster.finish_deletions()
    assert cluster.workers == []


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (2, "InvalidManifest", ". To go on, correct what it names"),
        (20, "RewardFailed", ". To go on, correct spec.models.reward, and what it calls"),
        (21, "BadModel", ". To go on, correct spec.models, or the folder it names"),
        (22, "BadPrompts", ". To go on, correct the file that spec.prompts.path names"),
        (23, "StorageFailed", ". To go on, make the volume under spec.checkpoints.path writable, free or enlarge it"),
        (24, "AddressInUse", ""),
        (
            25,
            "SampleFailed",
            ". To go on, correct or remove its line of the prompts, or allow some by spec.rollout.maxFailedSamples",
        ),
    ],
)
def test_a_verdict_of_the_coordinator_ends_the_job_in_its_own_words(code: int, reason: str, remedy: str) -> None:
    cluster = SimulatedCluster().begin()
    line = json.dumps({"level": "ERROR", "message": "BadModel: spec.models.actor.path: no such folder"})
    cluster.end("coordinator", code, message=f'{{"level": "INFO", "message": "begins"}}\n{line}\n')
    cluster.settle()
    failed = cluster.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", reason)
    summary = failed["message"].partition("\n")[0]
    assert summary.endswith(f"BadModel: spec.models.actor.path: no such folder{remedy}")
    assert cluster.phase == "Failed"


def test_an_exit_code_of_a_worker_that_no_restart_cures_fails_the_job_at_once() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("inference-0", 20, message="RewardRaised: spec.models.reward.function.file: KeyError: 'answer'")
    cluster.settle()
    assert cluster.counts == (0, 0)
    failed = cluster.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "RewardFailed")
    assert failed["message"] == (
        "job-inference-0: exit code 20 (the reward failed): RewardRaised: spec.models.reward.function.file: "
        "KeyError: 'answer'. To go on, correct spec.models.reward, and what it calls"
    )


@pytest.mark.parametrize("code", [2, 24])
def test_a_wrong_setting_or_a_taken_port_of_one_worker_is_a_failure_like_any_other(code: int) -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("inference-0", code)
    cluster.settle()
    assert cluster.counts == (1, 0)
    assert cluster.condition("Failed")["status"] == "False"


def test_evictions_and_deletions_from_outside_are_disruptions_without_a_limit() -> None:
    cluster = SimulatedCluster().begin()
    for number in range(6):
        if number % 2:
            cluster.evict("generation-1")
        else:
            cluster.ask_deletion("job-generation-1")
        cluster.settle()
        cluster.finish_deletions()
        cluster.settle()
        cluster.later(300)
        cluster.settle()
        cluster.run()
        assert cluster.counts == (0, number + 1)
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Failed")["status"] == "False"


def test_a_deleted_coordinator_is_replaced_and_the_job_recovers() -> None:
    cluster = SimulatedCluster().begin()
    cluster.ask_deletion("job-coordinator", grace=300)
    cluster.later(11)
    cluster.settle()
    assert cluster.phase == "Recovering"
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    cluster.run()
    cluster.later(11)
    cluster.read()
    cluster.settle()
    assert cluster.phase == "Running"
    assert cluster.counts == (0, 1)


def test_a_rank_of_a_lost_node_is_not_waited_for_as_one_that_stays_for_a_checkpoint() -> None:
    cluster = SimulatedCluster().begin()
    cluster.ask_deletion("job-training-0", grace=360)
    cluster.ask_deletion("job-training-1", grace=360)
    cluster.pods["job-training-1"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.settle()
    cluster.later(62)
    assert [item.name for item in cluster.plan().delete if item.force] == ["job-training-1"]
    cluster.settle()
    cluster.later(300)
    assert [item.name for item in cluster.plan().delete if item.force] == []
    cluster.later(29)
    assert [item.name for item in cluster.plan().delete if item.force] == ["job-training-0"]


def test_workers_of_a_lost_node_are_deleted_by_force_and_the_coordinator_is_not() -> None:
    cluster = SimulatedCluster().begin()
    cluster.ask_deletion("job-generation-0")
    cluster.ask_deletion("job-coordinator")
    look = cluster.settle().requeue_after
    assert look is not None
    assert look <= 62
    cluster.later(62)
    forced = [item.name for item in cluster.plan().delete if item.force]
    assert forced == ["job-generation-0"]
    cluster.settle()
    assert "job-coordinator" in cluster.pods
    assert cluster.counts == (0, 2)


def test_a_worker_that_ended_well_too_early_comes_back_without_being_counted() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("generation-0", 0)
    look = cluster.settle().requeue_after
    assert cluster.finish_deletions() == [], "the coordinator may be about to end too"
    assert look is not None
    cluster.later(15)
    cluster.settle()
    assert cluster.finish_deletions() == ["job-generation-0"]
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.counts == (0, 0)


def test_a_container_beside_ours_that_still_runs_keeps_nothing_of_a_finished_job() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("coordinator", 0)
    sidecar = {"name": "logs", "restartCount": 0, "state": {"running": {}}}
    cluster.pods["job-coordinator"]["status"]["containerStatuses"].append(sidecar)
    cluster.settle()
    assert cluster.condition("Complete")["status"] == "True"
    assert "job-coordinator" in cluster.finish_deletions()


def test_unschedulable_pods_are_told_with_the_schedulers_words() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.run("coordinator")
    cluster.cannot_schedule("generation-0", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    cluster.cannot_schedule("generation-1", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    look = cluster.settle().requeue_after
    assert cluster.phase == "Starting", "volumes may still be being bound"
    assert look == 10
    cluster.later(look)
    cluster.settle()
    running = cluster.condition("Running")
    assert running["reason"] == "Unschedulable"
    assert running["message"].startswith(
        "no node can take job-generation-0, job-generation-1 (0/3 nodes are available: 3 Insufficient nvidia.com/gpu): "
        "add nodes, free some, or lower spec.generation.replicas"
    )


def test_a_missing_image_is_told_with_its_name() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    words = 'Back-off pulling image "example.org/worker:nosuch"'
    cluster.wait_with("training-1", "ImagePullBackOff", words)
    cluster.later(11)
    cluster.settle()
    assert cluster.running_message.startswith(f"job-training-1 cannot get the image ({words})")


def test_an_init_container_that_fails_is_told_with_the_last_line_of_its_log() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "Traceback\nOSError: no space left\n"}}
    # Between two attempts it runs again, and the sentence stays.
    states: tuple[Json, ...] = ({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}, {"running": {}})
    for state in states:
        cluster.wait_with("coordinator", "PodInitializing", "")
        status = {"name": "assets", "ready": False, "state": state, "lastState": ended}
        cluster.pods["job-coordinator"]["status"]["initContainerStatuses"] = [status]
        cluster.later(11)
        cluster.settle()
        message = (
            "job-coordinator cannot be started (Init:Error: assets ended with exit code 1: OSError: no space left)"
        )
        assert cluster.running_message.startswith(message)


def test_a_crash_loop_is_told_with_the_last_line_of_its_log() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.run()
    cluster.end("generation-0", 24, message='{"message": "0.0.0.0:7710 is taken"}', restarted=False)
    cluster.later(11)
    cluster.settle()
    message = cluster.running_message
    assert "job-generation-0 keeps ending: exit code 24 (its port is in use): 0.0.0.0:7710 is taken" in message


def test_an_exceeded_quota_is_told_and_tried_again_later() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    del cluster.pods["job-training-1"]
    cluster.refusals = {"job-training-1": 'pods "job-training-1" is forbidden: exceeded quota: team, requested: pods=1'}
    cluster.later(11)
    plan = cluster.plan()
    assert [item["metadata"]["name"] for item in plan.apply] == ["job-training-1"]
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 15
    cluster.carry_out(plan)
    message = cluster.running_message
    assert message.startswith("job-training-1 cannot be created: ")
    assert "free quota in the namespace, or raise it" in message
