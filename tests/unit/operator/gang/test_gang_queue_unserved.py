"""A job whose label names a queue that the operator does not serve, for a while or at all."""

from tests.support.operator.queued_cluster import EVERY_API, WORKLOAD_KEY, QueuedCluster, running_in_queue
from tests.support.operator.simulated_cluster import EVERYBODY, SimulatedCluster

from rlhf_operator.gang import ServedApis


def test_a_job_with_a_queue_that_the_operator_does_not_use_waits_and_starts_when_the_label_goes() -> None:
    cluster = QueuedCluster()
    cluster.served = ServedApis()
    cluster.settle()
    assert (cluster.workers, cluster.bodies, cluster.certificates) == ([], {}, False)
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "QueueNotServed")
    assert "the label kueue.x-k8s.io/queue-name: team asks for a queue" in admitted["message"]
    assert "install Kueue, or remove the label" in admitted["message"]
    assert cluster.running_message == f"nothing is started: {admitted['message']}"
    assert cluster.phase == "Queued"
    assert "Queued" in cluster.events
    del cluster.job["metadata"]["labels"]
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Admitted")["reason"] == "NoQueue"


def test_a_job_that_waits_for_an_unserved_queue_uses_it_once_it_is_served() -> None:
    cluster = QueuedCluster()
    cluster.served = ServedApis()
    cluster.settle()
    cluster.served = EVERY_API
    cluster.settle()
    assert cluster.condition("Admitted")["reason"] == "WaitingForQuota"
    cluster.admit()
    cluster.settle()
    assert cluster.workers == EVERYBODY


def test_a_job_that_runs_goes_on_when_its_queue_is_not_served_any_more() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    cluster.settle()
    assert cluster.workers == EVERYBODY
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("True", "NoQueue")
    assert (
        "the job has started without a queue: the label kueue.x-k8s.io/queue-name: team asks for a queue"
        in admitted["message"]
    )
    cluster.ask_deletion("job-generation-0")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY, "what is lost is made again"
    cluster.reading = None
    cluster.job["spec"]["suspend"] = True
    while cluster.pods:
        cluster.settle()
        cluster.finish_deletions()
    cluster.settle()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.workers == [], "a new start asks anew"
    assert cluster.condition("Admitted")["reason"] == "QueueNotServed"


def test_a_job_that_started_without_a_queue_goes_on_when_the_queue_is_served() -> None:
    cluster = QueuedCluster()
    cluster.served = ServedApis(ignores_labels=True)
    cluster.settle()
    cluster.begin()
    cluster.served = EVERY_API
    cluster.later(11)
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert not any("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())
    assert WORKLOAD_KEY not in cluster.bodies
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("True", "NoQueue")
    assert admitted["message"].endswith("the job has started without its queue, and asks for quota at its next start")
    cluster.reading = None
    cluster.job["spec"]["suspend"] = True
    cluster.end_all()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert (cluster.workers, cluster.condition("Admitted")["reason"]) == ([], "WaitingForQuota")


def test_a_job_whose_queue_was_not_served_for_a_while_keeps_its_reservation() -> None:
    cluster = running_in_queue()
    cluster.served = ServedApis()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    cluster.served = EVERY_API
    cluster.settle()
    assert cluster.condition("Admitted")["reason"] == "QuotaReserved"
    assert cluster.workers == EVERYBODY


def test_labels_may_be_ignored_where_whoever_runs_the_operator_says_so() -> None:
    cluster = QueuedCluster()
    cluster.served = ServedApis(ignores_labels=True)
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert "has no effect" in cluster.condition("Admitted")["message"]
