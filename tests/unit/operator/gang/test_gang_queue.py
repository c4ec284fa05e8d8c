"""A job with a queue: no pods before admission, their placement then, effects of an eviction, and messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster, running_in_queue
from tests.support.operator.simulated_cluster import EVERYBODY

from rlhf_common import names
from rlhf_operator.gang.kueue_queue import QueuePriority
from rlhf_operator.reconcile import ReconcilePlan


def test_nothing_is_made_before_the_queue_admits_the_job() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    assert list(cluster.bodies) == [WORKLOAD_KEY]
    assert not cluster.certificates
    assert cluster.workers == []
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "WaitingForQuota")
    assert "LocalQueue team" in admitted["message"]
    assert cluster.phase == "Queued"
    assert "startTime" not in cluster.job["status"]
    cluster.condition_of_workload("QuotaReserved", "False", "Pending", "couldn't assign flavors: insufficient quota.")
    cluster.later(11)
    cluster.settle()
    assert cluster.condition("Admitted")["message"].endswith("couldn't assign flavors: insufficient quota")


def test_a_workload_that_is_refused_is_told() -> None:
    cluster = QueuedCluster()
    cluster.refusals = {"rlhfjob-job": "forbidden"}
    plan = cluster.plan()
    cluster.carry_out(plan)
    assert cluster.condition("Admitted")["message"].endswith("rlhfjob-job is refused: forbidden")
    assert plan.requeue_after is not None


def test_the_workload_counts_every_pod_and_nothing_that_is_no_matter_of_quota() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    body = cluster.bodies[WORKLOAD_KEY]
    assert body["spec"]["queueName"] == "team"
    assert {pod_set["name"]: pod_set["count"] for pod_set in body["spec"]["podSets"]} == {
        "coordinator": 1,
        "generation": 2,
        "inference": 1,
        "training": 2,
    }
    assert body["spec"]["podSets"][0]["template"] == {
        "metadata": {"labels": {"rlhf.dev/group": "coordinator"}},
        "spec": {
            "containers": [
                {"name": "worker", "image": "unused", "resources": {"requests": {"cpu": "1", "memory": "512Mi"}}}
            ]
        },
    }


def test_an_admitted_job_runs_where_its_flavors_are() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("True", "QuotaReserved")
    assert "ClusterQueue gpus" in admitted["message"]
    for body in cluster.pods.values():
        assert body["spec"]["nodeSelector"] == {"gpu": "h200"}
        assert body["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert "QuotaReserved" in cluster.events


def test_a_job_queues_with_the_priority_of_its_class_and_not_while_that_cannot_be_read() -> None:
    cluster = QueuedCluster()
    cluster.priority = QueuePriority("WorkloadPriorityClass", "research", None)
    plan = cluster.settle()
    assert WORKLOAD_KEY not in cluster.bodies
    assert "WorkloadPriorityClass research cannot be read" in cluster.condition("Admitted")["message"]
    assert plan.requeue_after is not None
    cluster.priority = QueuePriority("WorkloadPriorityClass", "research", 100)
    cluster.settle()
    spec = cluster.bodies[WORKLOAD_KEY]["spec"]
    assert spec["priority"] == 100
    assert spec["priorityClassRef"] == {
        "group": "kueue.x-k8s.io",
        "kind": "WorkloadPriorityClass",
        "name": "research",
    }


def test_no_pod_is_made_while_a_flavor_cannot_be_read() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.flavors = {}
    plan = cluster.settle()
    assert cluster.workers == []
    assert "ResourceFlavor h200" in cluster.condition("Admitted")["message"]
    assert plan.requeue_after is not None


def test_an_evicted_job_without_checkpoints_is_said_to_begin_anew() -> None:
    cluster = QueuedCluster(checkpoints=None)
    cluster.settle()
    cluster.admit()
    cluster.begin()
    cluster.evict()
    cluster.settle()
    assert cluster.phase == "Stopping"
    assert cluster.running_message.endswith(
        "the job's pods end; spec.checkpoints is not set, so nothing is saved and the job starts from the beginning "
        "later"
    )


def test_an_evicted_job_saves_its_checkpoint_ends_and_gives_the_reservation_back() -> None:
    cluster = running_in_queue()
    assert cluster.reports == [["PodsReady"], ["PodsReady"]]
    cluster.evict()
    cluster.settle()
    assert cluster.condition("Admitted")["reason"] == "Evicted"
    assert "higher priority" in cluster.condition("Admitted")["message"]
    assert cluster.phase == "Checkpointing"
    assert cluster.status["admission"], "the pods still use it"
    cluster.reading = None
    assert cluster.end_all()[0] == ["coordinator"], "the checkpoint needs the ranks"
    assert "admission" not in cluster.status
    assert cluster.workload is not None
    assert {kind: cluster.workload.conditions[kind][0] for kind in ("QuotaReserved", "Admitted", "Requeued")} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Requeued": "True",
    }
    assert cluster.workload.conditions["PodsReady"][:2] == ("False", "WaitForStart")
    assert cluster.phase == "Queued"
    cluster.admit()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.counts == (0, 0)


@pytest.mark.parametrize("reason", ["Preempted", "PodsReadyTimeout", "NodeFailures", "Deactivated"])
def test_pods_of_an_evicted_workload_are_not_ready_from_the_eviction_on(reason: str) -> None:
    cluster = running_in_queue()
    assert cluster.workload is not None
    assert cluster.workload.conditions["PodsReady"][:2] == ("True", "Started")
    cluster.evict(reason)
    cluster.settle()
    assert cluster.workload.conditions["PodsReady"][:2] == ("False", "WaitForStart")
    assert cluster.status["admission"], "the pods still use it"
    assert cluster.settle().report is None, "it is reported once"
    cluster.reading = None
    cluster.end_all()
    cluster.admit()
    cluster.begin()
    assert cluster.workload.conditions["PodsReady"][:2] == ("True", "Started")


def test_a_workload_that_lost_its_admission_in_another_way_has_no_ready_pods() -> None:
    cluster = running_in_queue()
    cluster.reading = None
    del cluster.status["admission"]
    for kind in ("QuotaReserved", "Admitted"):
        cluster.condition_of_workload(kind, "False", "Pending", "taken back.")
    cluster.end_all()
    assert cluster.workload is not None
    assert cluster.workload.conditions["PodsReady"][:2] == ("False", "WaitForStart")


def test_a_workload_names_its_job_by_the_label_that_kueues_messages_read() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    assert cluster.bodies[WORKLOAD_KEY]["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == "job-uid"


def test_a_suspended_job_does_not_claim_to_ask_its_queue() -> None:
    cluster = QueuedCluster(suspend=True)
    cluster.settle()
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "NotQueued")
    assert admitted["message"] == "the job is suspended: it is not in LocalQueue team, and no quota is reserved for it"
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.condition("Admitted")["reason"] == "WaitingForQuota"
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert cluster.condition("Admitted")["reason"] == "NotQueued"


def test_a_job_that_is_suspended_while_it_runs_keeps_its_admission_until_its_pods_are_gone() -> None:
    cluster = running_in_queue()
    cluster.reading = None
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert cluster.condition("Admitted")["status"] == "True"
    cluster.end_all()
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "NotQueued")


def test_a_deactivated_workload_is_told_as_such() -> None:
    cluster = running_in_queue()
    cluster.active = False
    cluster.see()
    cluster.settle()
    assert "set it to true" in cluster.condition("Admitted")["message"]
    cluster.reading = None
    cluster.end_all()
    assert cluster.workload is not None
    assert cluster.workload.conditions["Requeued"][0] == "False"


def test_a_suspended_job_holds_no_quota_and_queues_again() -> None:
    cluster = running_in_queue()
    cluster.reading = None
    cluster.job["spec"]["suspend"] = True
    cluster.end_all()
    assert cluster.bodies.keys().isdisjoint([WORKLOAD_KEY])
    assert cluster.phase == "Suspended"
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.phase == "Queued"
    assert WORKLOAD_KEY in cluster.bodies


def test_a_finished_job_frees_its_quota() -> None:
    cluster = running_in_queue()
    cluster.end("coordinator", 0)
    cluster.reading = None
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workload is not None
    assert cluster.workload.conditions["Finished"][:2] == ("True", "Succeeded")
    assert cluster.settle().report is None


def test_a_job_of_another_controller_is_left_alone() -> None:
    cluster = QueuedCluster(managedBy="kueue.x-k8s.io/multikueue")
    assert cluster.plan() == ReconcilePlan()
    assert "status" not in cluster.job


MOVES = st.lists(
    st.sampled_from(["admit", "evict", "grow", "shrink", "suspend", "resume", "kubelet", "run"]), max_size=12
)


@settings(max_examples=25, deadline=None)
@given(MOVES)
def test_whatever_happens_pods_exist_under_a_reservation_only_and_turns_come_to_rest(moves: list[str]) -> None:
    cluster = QueuedCluster()
    cluster.settle()
    for move in moves:
        replicas = cluster.job["spec"]["generation"]["replicas"]
        if move == "admit" and cluster.workload and not cluster.status.get("admission"):
            cluster.admit()
        elif move == "evict" and cluster.status.get("admission"):
            cluster.evict()
        elif move in ("grow", "shrink"):
            cluster.job["spec"]["generation"]["replicas"] = max(1, min(4, replicas + (1 if move == "grow" else -1)))
        elif move in ("suspend", "resume"):
            cluster.job["spec"]["suspend"] = move == "suspend"
        elif move == "kubelet":
            cluster.finish_deletions()
        elif move == "run":
            cluster.run()
        cluster.settle()
        if any("deletionTimestamp" not in body["metadata"] for body in cluster.pods.values()):
            assert cluster.status.get("admission"), move
        counts = cluster.workload.counts if cluster.workload else {}
        for group, count in counts.items():
            if cluster.status.get("admission"):
                assert (
                    sum(body["metadata"]["labels"][names.LABEL_GROUP] == group for body in cluster.pods.values())
                    <= count
                )
