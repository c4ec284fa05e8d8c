"""The life of a job as seen by its user: conditions, pods and times, from apply to deletion."""

import pytest
from tests.support.operator.simulated_cluster import EVERYBODY, SimulatedCluster

from rlhf_api import manifest
from rlhf_api.rules.unavailable import Unavailable
from rlhf_operator.reconcile import parsed_job
from rlhf_operator.reconcile.phases import MAX_PODS_PER_RECONCILE


def test_an_applied_job_gets_all_conditions_certificates_objects_and_pods() -> None:
    cluster = SimulatedCluster()
    first = cluster.plan()
    assert first.issue_certificates
    assert not [item for item in first.apply if item["kind"] == "Pod"], "pods would wait for the Secret"
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert {kind for kind, _ in cluster.applied} == {"ConfigMap", "Service", "NetworkPolicy"}
    status = cluster.job["status"]
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "Planned": "True",
        "Admitted": "True",
        "Running": "False",
        "Resizing": "False",
        "Restarting": "False",
        "Suspended": "False",
        "Complete": "False",
        "Failed": "False",
    }
    assert cluster.phase == "Starting"
    assert status["startTime"] == "2026-08-22T10:00:00Z"
    assert status["algorithm"] == "ppo"
    assert cluster.events == ["PlanMade", "Starting"]


def test_a_running_job_shows_its_progress() -> None:
    cluster = SimulatedCluster().begin()
    assert cluster.condition("Running") | {"lastTransitionTime": ""} == {
        "type": "Running",
        "status": "True",
        "reason": "Running",
        "message": "iteration 3 (3 of 100 are trained): generating",
        "lastTransitionTime": "",
        "observedGeneration": 1,
    }
    assert cluster.job["status"]["progress"]["summary"] == "3/100"
    ready = {group["name"]: group["ready"] for group in cluster.job["status"]["groups"]}
    assert ready == {"coordinator": 1, "generation": 2, "inference": 1, "training": 2}


def test_progress_is_written_at_most_every_ten_seconds_and_not_when_there_is_none() -> None:
    cluster = SimulatedCluster().begin()
    cluster.read(iteration=4)
    plan = cluster.plan()
    assert plan.idle
    assert plan.requeue_after is not None
    assert 0 < plan.requeue_after <= 10
    cluster.later(plan.requeue_after)
    cluster.settle()
    assert cluster.job["status"]["progress"]["summary"] == "4/100"
    cluster.later(30)
    cluster.read(iteration=4)
    assert cluster.plan().idle, "only the time of the reading is new"


def test_numbers_that_are_not_finite_never_reach_the_api_server() -> None:
    cluster = SimulatedCluster().begin()
    cluster.later(11)
    cluster.read(iteration=5, metrics={"reward": float("nan"), "kl": float("inf"), "samples_per_second": 12.3456789})
    cluster.settle()
    progress = cluster.job["status"]["progress"]
    assert "reward" not in progress
    assert "kl" not in progress
    assert progress["samplesPerSecond"] == 12.3457


def test_skipped_steps_are_counted_and_told_once() -> None:
    cluster = SimulatedCluster().begin()
    for iteration, skipped in enumerate([0.0, 2.0, 2.0, 3.0]):
        cluster.later(11)
        cluster.read(iteration=iteration, metrics={"nonfinite_steps": skipped})
        cluster.settle()
    assert cluster.job["status"]["progress"]["nonFiniteSteps"] == 3
    assert cluster.events.count("StepsSkipped") == 2


def test_a_sample_that_workers_fail_on_is_told_once_and_shown() -> None:
    cluster = SimulatedCluster().begin()
    text = "sample 5 of iteration 0 could not be decoded, once, the last time on generation-1: x"
    for _ in range(3):
        cluster.later(11)
        cluster.read(iteration=0, sample_failures=(text,))
        cluster.settle()
    assert cluster.job["status"]["progress"]["sampleFailure"] == text
    assert text in cluster.running_message
    assert cluster.events.count("SampleFailed") == 1


def test_a_tracker_that_was_given_up_is_told_once_and_shown() -> None:
    cluster = SimulatedCluster().begin()
    text = "wandb is not written from now on: it has not answered for 120 s"
    for _ in range(3):
        cluster.later(11)
        cluster.read(iteration=0, lost_trackers=(text, "mlflow is not written from now on: x"))
        cluster.settle()
    assert cluster.job["status"]["progress"]["trackerLost"] == text
    assert text in cluster.running_message
    assert cluster.events.count("TrackerLost") == 1
    cluster.later(11)
    cluster.read(iteration=1)  # a coordinator that began anew has its trackers again
    cluster.settle()
    assert "trackerLost" not in cluster.job["status"]["progress"]


def test_warnings_of_the_start_are_told_once_and_shown() -> None:
    cluster = SimulatedCluster().begin()
    warnings = ("/data/p.jsonl line 3 holds <|im_start|>: set chatTemplate to false", "another")
    for _ in range(3):
        cluster.later(11)
        cluster.read(iteration=0, warnings=warnings)
        cluster.settle()
    assert cluster.job["status"]["progress"]["warning"] == ". ".join(warnings)
    message = cluster.running_message
    assert all(f"warning: {warning}" in message for warning in warnings)
    assert cluster.events.count("StartWarning") == 1


def test_drafting_is_shown_with_numbers_and_told_once_when_it_is_switched() -> None:
    cluster = SimulatedCluster().begin()
    summary, switched = "Auto: 2.10 tokens per step", "iteration 3: speculation is on: 2.10 tokens per step"
    for _ in range(3):
        cluster.later(11)
        cluster.read(iteration=3, speculation=summary, speculation_switched=switched)
        cluster.settle()
    cluster.later(11)
    cluster.read(iteration=4, speculation=summary)  # the coordinator is another one
    cluster.settle()
    plan = cluster.job["status"]["plan"]
    assert (plan["speculation"], plan["speculationSwitched"]) == (summary, switched)
    assert cluster.events.count("SpeculationSwitched") == 1


def test_a_manifest_the_api_server_could_not_check_is_refused_in_words_and_nothing_is_made() -> None:
    cluster = SimulatedCluster(generation={"replicas": 2, "template": {"spec": {"hostNetwork": True}}})
    cluster.settle()
    assert cluster.workers == []
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidManifest")
    assert "spec.generation.template.spec.hostNetwork" in planned["message"]
    assert "must be false or left out" in planned["message"]
    cluster.job["spec"]["generation"] = {"replicas": 2}
    cluster.job["metadata"]["generation"] = 2
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Planned")["observedGeneration"] == 2


def test_what_this_version_cannot_do_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = (Unavailable("spec.training.backend", "megatron", "torch"),)
    for module in (manifest, parsed_job):
        monkeypatch.setattr(module, "UNAVAILABLE", lacking)
    cluster = SimulatedCluster(training={"backend": "megatron"})
    cluster.settle()
    assert cluster.condition("Planned")["reason"] == "NotAvailableInThisVersion"
    assert "use torch" in cluster.condition("Planned")["message"]
    assert cluster.workers == []


def test_a_live_job_goes_on_when_its_template_becomes_invalid() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"]["training"]["template"] = {"spec": {"hostPID": True}}
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Planned")["status"] == "False"
    assert cluster.phase == "Running"


def test_the_coordinators_success_completes_the_job_and_frees_the_workers() -> None:
    cluster = SimulatedCluster().begin()
    cluster.later(60)
    cluster.end("generation-0", 0)
    cluster.end("coordinator", 0)
    cluster.settle()
    assert cluster.condition("Complete")["status"] == "True"
    assert {group["restarts"] for group in cluster.job["status"]["groups"]} == {0}, "nothing was replaced"
    assert cluster.phase == "Complete"
    assert cluster.job["status"]["completionTime"] == "2026-08-22T10:01:11Z"
    assert cluster.job["status"]["progress"]["summary"] == "100/100"
    cluster.finish_deletions()
    assert cluster.workers == ["coordinator", "generation-0"], "what has ended stays for its logs"
    assert cluster.settle().idle
    cluster.pods.clear()
    assert cluster.settle().idle, "a finished job is never started again"


def test_a_job_past_its_deadline_fails() -> None:
    cluster = SimulatedCluster(runPolicy={"activeDeadlineSeconds": 100, "backoffLimit": 2}).begin()
    assert (cluster.plan().requeue_after or 1e9) <= 100
    cluster.later(100)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "DeadlineExceeded"
    cluster.finish_deletions()
    assert cluster.workers == []


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    cluster = SimulatedCluster(runPolicy={"ttlSecondsAfterFinished": 60}).begin()
    cluster.end("coordinator", 0)
    left = cluster.settle().requeue_after
    assert left is not None
    assert left <= 60
    cluster.later(left)
    assert cluster.plan().delete_job


def test_a_job_under_deletion_is_left_alone() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:00Z"
    cluster.pods.clear()
    assert cluster.plan().idle


def test_a_suspension_ends_the_coordinator_before_the_ranks_that_its_checkpoint_needs() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    leaving = [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]
    assert leaving == ["job-coordinator"]
    assert cluster.phase == "Checkpointing"
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.condition("Suspended")["status"] == "False"
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == []
    assert cluster.condition("Suspended")["status"] == "True"
    assert "continues from its last checkpoint" in cluster.condition("Suspended")["message"]
    assert cluster.phase == "Suspended"
    assert "startTime" not in cluster.job["status"], "the deadline is counted anew"
    cluster.later(3600)
    assert cluster.plan() == cluster.settle()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.counts == (0, 0)


def test_a_resumed_job_is_not_running_by_the_answer_of_its_earlier_coordinator() -> None:
    cluster = SimulatedCluster().begin()
    progress = cluster.job["status"]["progress"]
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    cluster.finish_deletions()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    cluster.run()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Running")["status"] == "False"
    assert cluster.phase != "Running"
    assert "generating" not in cluster.running_message
    assert cluster.job["status"]["progress"] == progress, "the progress is what was last heard"
    cluster.read(phase="Starting")
    cluster.settle()
    assert cluster.phase == "Starting"
    cluster.read()
    cluster.settle()
    assert cluster.phase == "Running"


def test_an_answer_of_a_process_that_has_ended_says_nothing_of_its_successor_in_the_same_pod() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("coordinator", 1)
    cluster.settle()
    assert cluster.phase == "Recovering"
    cluster.read()
    cluster.settle()
    assert cluster.phase == "Running"


def test_a_suspension_without_checkpoints_says_that_the_job_will_begin_anew_and_never_that_one_is_saved() -> None:
    cluster = SimulatedCluster(checkpoints=None).begin()
    cluster.job["spec"]["suspend"] = True
    said = set()
    for _ in range(3):
        cluster.settle()
        said |= {cluster.condition(kind)["message"] for kind in ("Suspended", "Running")}
        assert cluster.phase == ("Stopping" if cluster.pods else "Suspended")
        cluster.finish_deletions()
    assert len(said) == 3, "while pods end, and two when they have"
    assert all(
        "spec.checkpoints is not set, so nothing is saved and the job will start from the beginning" in each
        for each in said
    )
    assert "Checkpointing" not in cluster.events


def test_a_coordinator_that_never_ran_is_not_said_to_save_a_checkpoint() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert cluster.condition("Suspended")["message"].startswith(
        "the job's pods end; it continues from its last checkpoint"
    )


def test_a_job_that_is_suspended_from_the_start_makes_nothing() -> None:
    cluster = SimulatedCluster(suspend=True)
    cluster.settle()
    assert cluster.workers == []
    assert cluster.condition("Suspended")["status"] == "True"


def test_resuming_while_the_last_pods_still_end_counts_nothing() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    cluster.later(5)
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.job["status"]["restarts"]["failures"] == 0


@pytest.mark.parametrize("group", ["generation", "inference"])
def test_a_group_grows_and_shrinks_while_the_job_runs(group: str) -> None:
    cluster = SimulatedCluster().begin()
    before = cluster.workers
    count = len([item for item in before if item.startswith(group)])
    cluster.job["spec"][group]["replicas"] = count + 2
    cluster.settle()
    assert [worker for worker in cluster.workers if worker not in before] == [
        f"{group}-{count}",
        f"{group}-{count + 1}",
    ]
    resizing = cluster.condition("Resizing")
    assert (resizing["status"], resizing["reason"]) == ("True", "ScalingUp")
    assert cluster.reported == [{group: count + 2}], "the coordinator lets them in"
    cluster.run()
    cluster.later(11)
    cluster.read(working={"generation": 4, "inference": 3, "training": 2})
    cluster.settle()
    assert cluster.condition("Resizing")["reason"] == "AtDesiredSize"
    cluster.job["spec"][group]["replicas"] = 1
    cluster.settle()
    leaving = sorted(name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"])
    assert leaving == [f"job-{group}-{index}" for index in range(1, count + 2)]
    assert cluster.condition("Resizing")["reason"] == "ScalingDown"
    cluster.finish_deletions()
    cluster.settle()
    assert [worker for worker in cluster.workers if worker.startswith(group)] == [f"{group}-0"]
    assert cluster.condition("Resizing")["status"] == "False"
    assert cluster.counts == (0, 0)


def test_growing_again_before_the_leaving_pods_are_gone_counts_no_disruption() -> None:
    cluster = SimulatedCluster(generation={"replicas": 3}).begin()
    cluster.job["spec"]["generation"]["replicas"] = 1
    cluster.settle()
    cluster.job["spec"]["generation"]["replicas"] = 3
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert [worker for worker in cluster.workers if worker.startswith("generation")] == [
        f"generation-{i}" for i in range(3)
    ]
    assert cluster.job["status"]["restarts"]["disruptions"] == 0


def test_a_big_job_is_made_in_turns_so_that_small_ones_are_served_between() -> None:
    cluster = SimulatedCluster(generation={"replicas": 400})
    cluster.carry_out(cluster.plan())
    plan = cluster.plan()
    assert len([item for item in plan.apply if item["kind"] == "Pod"]) == MAX_PODS_PER_RECONCILE < 400
    assert plan.requeue_after == 0
    cluster.settle()
    assert len(cluster.pods) == 404


def test_a_resize_goes_on_until_the_group_that_grows_is_there_though_another_shrank_meanwhile() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"]["generation"]["replicas"] = 1
    cluster.job["spec"]["inference"]["replicas"] += 1
    cluster.settle()
    assert cluster.condition("Resizing")["reason"] == "ScalingDown"
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.condition("Resizing")["reason"] == "ScalingUp"
    cluster.run()
    cluster.later(11)
    cluster.read(working={"generation": 1, "inference": 2, "training": 2})
    cluster.settle()
    assert cluster.condition("Resizing")["status"] == "False"
