"""A running job of a queue that grows, shrinks or asks anew."""

from typing import Any

from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster, running_in_queue
from tests.support.operator.simulated_cluster import EVERYBODY

from rlhf_operator.reconcile import ReconcilePlan


def edit(cluster: QueuedCluster, group: str, **fields: Any) -> ReconcilePlan:
    """Edit a group as a user, and run the operator until nothing is left to do."""
    cluster.job["spec"][group] |= fields
    cluster.job["metadata"]["generation"] += 1
    return cluster.settle()


def test_a_job_that_grows_keeps_what_runs_and_says_why_it_does_not_grow() -> None:
    cluster = running_in_queue()
    admitted = cluster.bodies[WORKLOAD_KEY]
    edit(cluster, "generation", replicas=500)
    assert cluster.workers == EVERYBODY
    assert not any("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())
    assert cluster.bodies[WORKLOAD_KEY] == admitted
    condition = cluster.condition("Admitted")
    assert (condition["status"], condition["reason"]) == ("True", "QuotaReserved")
    words = (
        "generation stays at 2 of 500 pods: LocalQueue team has admitted no more, and the job keeps what it has. "
        "Suspend the job and resume it to ask for all"
    )
    assert condition["message"] == f"LocalQueue team: ClusterQueue gpus has room. {words}"
    resizing = cluster.condition("Resizing")
    assert (resizing["status"], resizing["reason"], resizing["message"]) == ("False", "LimitedByQueue", words)
    assert cluster.phase == "Running"
    assert cluster.events.count("LimitedByQueue") == 1
    assert cluster.settle().resize is None, "the coordinator is given the size that is there"


def test_a_job_grows_to_what_was_admitted_and_no_further() -> None:
    cluster = running_in_queue(generation={"replicas": 3})
    edit(cluster, "generation", replicas=1)
    cluster.finish_deletions()
    assert cluster.condition("Admitted")["status"] == "True"
    edit(cluster, "generation", replicas=4)
    assert [worker for worker in cluster.workers if "generation" in worker] == [f"generation-{n}" for n in range(3)]
    assert "generation stays at 3 of 4 pods" in cluster.condition("Admitted")["message"]
    edit(cluster, "generation", replicas=3)
    assert cluster.condition("Admitted")["message"] == "LocalQueue team: ClusterQueue gpus has room"
    assert cluster.condition("Resizing")["reason"] != "LimitedByQueue"


def test_groups_that_grow_together_are_named_both_and_a_lost_pod_is_made_again() -> None:
    cluster = running_in_queue()
    edit(cluster, "generation", replicas=3)
    edit(cluster, "inference", replicas=2)
    assert "generation stays at 2 of 3 pods, inference at 1 of 2 pods" in cluster.condition("Admitted")["message"]
    cluster.ask_deletion("job-generation-1")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Resizing")["reason"] == "LimitedByQueue"


def test_a_group_that_comes_or_goes_in_a_running_job_ends_no_pod() -> None:
    cluster = running_in_queue(inference={"replicas": 0})
    before = cluster.workers
    edit(cluster, "inference", replicas=1)
    assert cluster.workers == before
    assert cluster.condition("Admitted")["status"] == "True"
    assert "inference stays at 0 of 1 pods" in cluster.condition("Admitted")["message"]
    edit(cluster, "inference", replicas=0)
    assert cluster.workers == before
    cluster = running_in_queue()
    edit(cluster, "inference", replicas=0)
    cluster.finish_deletions()
    assert cluster.condition("Admitted")["status"] == "True"
    assert "generation-0" in cluster.workers


def test_a_job_that_grew_asks_for_all_when_it_is_resumed_or_evicted() -> None:
    for stop in ("suspend", "evict"):
        cluster = running_in_queue()
        edit(cluster, "generation", replicas=3)
        cluster.reading = None
        if stop == "suspend":
            cluster.job["spec"]["suspend"] = True
        else:
            cluster.evict()
        cluster.end_all()
        cluster.job["spec"]["suspend"] = False
        cluster.settle()
        assert cluster.bodies[WORKLOAD_KEY]["spec"]["podSets"][1]["count"] == 3
        assert cluster.condition("Admitted")["status"] == "False"
        cluster.admit()
        cluster.settle()
        assert len(cluster.workers) == 7


def test_other_requests_of_a_template_and_another_queue_ask_anew() -> None:
    for change in ("template", "queue"):
        cluster = running_in_queue()
        if change == "queue":
            cluster.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "other"
        else:
            larger = {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "3"}}}]}
            cluster.job["spec"]["generation"]["template"] = {"spec": larger}
        cluster.job["metadata"]["generation"] += 1
        cluster.settle()
        assert cluster.condition("Admitted")["reason"] == "WaitingForQuota"
        cluster.reading = None
        cluster.end_all()
        assert cluster.status == {}, "the Workload is another one"
        cluster.admit()
        cluster.settle()
        assert cluster.workers == EVERYBODY


def test_a_job_that_waits_may_ask_for_another_size() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.job["spec"]["generation"]["replicas"] = 5
    cluster.job["metadata"]["generation"] = 2
    cluster.settle()
    assert cluster.bodies[WORKLOAD_KEY]["spec"]["podSets"][1]["count"] == 5
