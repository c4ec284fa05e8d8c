"""Pods with a foreign finalizer: forced at most once, and named with the finalizer in every phase."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster

HOLD = "example.org/audit"
WORDS = f"cannot be removed: finalizer {HOLD} of another controller keeps a deleted object"


def kept_pods(*workers: str, **spec: Any) -> SimulatedCluster:
    """Return a running job in which some pods have a finalizer."""
    cluster = SimulatedCluster(**spec).begin()
    for worker in workers:
        cluster.pods[cluster.name(worker)]["metadata"]["finalizers"] = [HOLD]
    cluster.settle()
    return cluster


def test_a_pod_on_a_lost_node_is_forced_once_and_then_named_with_its_finalizer() -> None:
    cluster = kept_pods("generation-1")
    cluster.ask_deletion("job-generation-1")
    cluster.settle()
    assert WORDS not in cluster.running_message, "its node may still end it"
    cluster.later(62)
    assert [(item.name, item.force) for item in cluster.plan().delete] == [("job-generation-1", True)]
    cluster.settle()
    assert "job-generation-1" in cluster.pods
    for _ in range(10):
        cluster.later(60)
        cluster.read()
        assert cluster.plan().delete == ()
        cluster.settle()
    assert f"job-generation-1 {WORDS}" in cluster.running_message
    del cluster.pods["job-generation-1"]
    cluster.later(10)
    cluster.settle()
    assert WORDS not in cluster.running_message
    assert "job-generation-1" in cluster.pods, "it is made again"


def test_all_pods_that_one_finalizer_keeps_are_named_together() -> None:
    workers = ["generation-0", "generation-1", "training-0", "training-1"]
    cluster = kept_pods(*workers)
    for worker in workers:
        cluster.ask_deletion(f"job-{worker}", 0)
    look = cluster.settle().requeue_after
    assert look is not None
    assert look <= 10
    cluster.later(11)
    cluster.settle()
    assert f"job-generation-0, job-generation-1, job-training-0 and 1 more {WORDS}" in cluster.running_message


@pytest.mark.parametrize("ended", [False, True])
def test_a_suspension_names_what_keeps_it_from_its_end(ended: bool) -> None:
    cluster = kept_pods("training-0")
    cluster.job["spec"]["suspend"] = True
    for _ in range(4):
        cluster.settle()
        cluster.finish_deletions()
    assert cluster.workers == ["training-0"]
    if ended:
        cluster.end_for_good("training-0", 0)
    cluster.later(400)
    cluster.settle()
    assert f"job-training-0 {WORDS}" in cluster.condition("Suspended")["message"]
    assert cluster.condition("Suspended")["status"] == str(ended)
    assert cluster.plan().idle


def test_a_suspension_names_a_coordinator_on_a_node_that_does_not_answer() -> None:
    cluster = kept_pods(checkpoints={"path": "/checkpoints"})
    cluster.pods["job-coordinator"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    cluster.later(3600)
    cluster.settle()
    assert "the node of job-coordinator does not carry out its deletion" in cluster.condition("Suspended")["message"]


def test_a_finished_job_names_what_stays_of_it_until_it_is_gone() -> None:
    cluster = kept_pods("generation-0")
    cluster.end("coordinator", 0)
    cluster.settle()
    cluster.finish_deletions()
    cluster.later(62)
    cluster.settle()
    cluster.later(10)
    cluster.settle()
    assert cluster.running_message.startswith(f"all 100 iterations are trained. job-generation-0 {WORDS}; see that")
    assert cluster.condition("Complete")["message"] == "all 100 iterations are trained"
    del cluster.pods["job-generation-0"]
    cluster.settle()
    assert cluster.running_message == "all 100 iterations are trained"
