"""A process's last message outlives its pod: the job's status has the final checkpoint and the reason for the end."""

import json
from typing import Any

from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_operator.reconcile.observed.termination_log import KEPT, last_report, readable

CHECKPOINT = "/checkpoints/iteration-000100"
REPORT = {"iteration": 100, "checkpoint": CHECKPOINT, "metrics": {"reward": 0.75}}


def line(message: str, **more: Any) -> str:
    return json.dumps({"time": "2026-08-22T10:00:00", "level": "INFO", "message": message, **more})


def test_the_last_checkpoint_of_a_complete_job_is_that_of_its_last_iteration() -> None:
    cluster = SimulatedCluster().begin()
    cluster.read(
        iteration=97,
        last_checkpoint="/checkpoints/iteration-000090",
        metrics={"reward": 0.5, "kl": 0.1, "kl_per_token": 0.02},
    )
    cluster.settle()
    cluster.later(3)
    cluster.end("coordinator", 0, message=line("the job is Complete", report=REPORT))
    cluster.settle()
    status = cluster.job["status"]
    assert cluster.condition("Complete")["status"] == "True"
    assert status["lastCheckpoint"] == {"path": CHECKPOINT, "iteration": 100, "time": "2026-08-22T10:00:14Z"}
    assert (status["progress"]["summary"], status["progress"]["reward"]) == ("100/100", 0.75)
    assert (status["progress"]["kl"], status["progress"]["klPerToken"]) == (0.1, 0.02)


def test_the_loss_of_a_job_without_rewards_is_in_its_status_until_the_end() -> None:
    cluster = SimulatedCluster().begin()
    cluster.read(iteration=97, metrics={"loss": 0.7})
    cluster.later(30)
    cluster.settle()
    assert cluster.job["status"]["progress"]["loss"] == 0.7
    report = {"iteration": 100, "checkpoint": CHECKPOINT, "metrics": {"loss": 0.41}}
    cluster.end("coordinator", 0, message=line("the job is Complete", report=report))
    cluster.settle()
    assert cluster.job["status"]["progress"]["loss"] == 0.41
    assert "reward" not in cluster.job["status"]["progress"]


def test_a_job_that_ended_before_it_was_ever_read_names_its_checkpoint() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.run()
    cluster.end("coordinator", 0, message=line("the job is Complete", report=REPORT))
    cluster.settle()
    assert cluster.job["status"]["lastCheckpoint"]["path"] == CHECKPOINT
    assert cluster.job["status"]["progress"]["reward"] == 0.75


def test_a_suspended_job_names_the_checkpoint_that_its_suspension_made() -> None:
    cluster = SimulatedCluster().begin()
    cluster.read(iteration=40, last_checkpoint="/checkpoints/iteration-000040")
    cluster.settle()
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    reported = REPORT | {"iteration": 43, "checkpoint": "/checkpoints/iteration-000043"}
    cluster.end("coordinator", 130, message=line("the job is Stopped", report=reported), restarted=False)
    cluster.settle()
    cluster.finish_deletions()
    cluster.reading = None
    cluster.settle()
    assert cluster.job["status"]["lastCheckpoint"]["path"] == "/checkpoints/iteration-000043"
    assert cluster.job["status"]["progress"]["summary"] == "43/100"


def test_a_coordinator_that_was_started_again_knows_better_than_the_one_before() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("coordinator", 130, message=line("the job is Stopped", report=REPORT))
    cluster.later(11)
    cluster.read(iteration=44, last_checkpoint="/checkpoints/iteration-000044")
    cluster.settle()
    assert cluster.job["status"]["lastCheckpoint"]["path"] == "/checkpoints/iteration-000044"


def test_a_failed_job_keeps_the_last_lines_of_the_log_as_its_pods_go() -> None:
    cluster = SimulatedCluster().begin()
    trace = "Traceback (most recent call last):\n  File reward.py, line 7, in score\nKeyError: 'answer'"
    log = "\n".join([line("Scoring (iteration 3)"), line("RewardFailed: KeyError: 'answer'", traceback=trace)])
    cluster.end("coordinator", 20, message=log)
    cluster.settle()
    failed, running = cluster.condition("Failed"), cluster.condition("Running")
    summary, _, log_tail = failed["message"].partition("\n")
    assert summary == (
        "the coordinator ended with exit code 20 (the reward failed): RewardFailed: KeyError: 'answer'. "
        "To go on, correct spec.models.reward, and what it calls"
    )
    assert log_tail.splitlines() == [
        "The last lines of the log of job-coordinator:",
        "  Scoring (iteration 3)",
        "  Traceback (most recent call last):",
        "    File reward.py, line 7, in score",
        "  RewardFailed: KeyError: 'answer'",
    ]
    assert running["message"] == summary
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.condition("Failed")["message"] == failed["message"]


def test_a_log_of_one_line_is_not_told_twice() -> None:
    cluster = SimulatedCluster().begin()
    cluster.end("inference-0", 21, message="no such folder")
    cluster.settle()
    assert "\n" not in cluster.condition("Failed")["message"]


def test_lines_that_are_not_ours_are_kept_and_a_long_log_is_cut_at_a_line() -> None:
    assert readable("Traceback\n  f(x)\n  ^^~~\nValueError: no\n") == "Traceback\n  f(x)\nValueError: no"
    long = "\n".join(line(f"line {number}") for number in range(500))
    assert len(readable(long)) <= KEPT
    assert readable(long).splitlines()[0].startswith("line ")
    assert readable(long).endswith("line 499")


def test_an_object_that_the_kubelet_cut_is_saved_from_its_last_text() -> None:
    whole = line(
        "the worker failed: ValueError: 17 µm is no number",
        traceback='File "a.py"\n' * 80 + "ValueError: 17 µm is no number",
    )
    for cut in (*range(10, 100), *range(200, 212)):
        assert readable(whole[cut:]).endswith("ValueError: 17 µm is no number")
        assert "\\n" not in readable(whole[cut:])


def test_a_report_is_found_before_the_words_of_a_failure_and_in_nothing_else() -> None:
    log = "\n".join([line("the job is Failed", report=REPORT), line("StorageFailed: disk full")])
    result = last_report(log)
    assert result is not None
    assert (result.iteration, result.checkpoint, result.metrics) == (100, CHECKPOINT, {"reward": 0.75})
    assert last_report("") is None
    assert last_report('{"report": 7}\n[1]\nno JSON {') is None
