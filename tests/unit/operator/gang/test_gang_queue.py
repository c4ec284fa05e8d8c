"""A job with a queue: no pods before admission, their placement then, effects of an eviction, and messages."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.queued_cluster import EVERY_API, WORKLOAD_KEY, QueuedCluster
from tests.support.operator.simulated_cluster import EVERYBODY, SimulatedCluster

from rlhf_common import names
from rlhf_operator.gang import ServedApis
from rlhf_operator.gang.kueue_queue import QueuePriority
from rlhf_operator.reconcile import ReconcilePlan

Json = dict[str, Any]


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
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
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
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
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
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
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
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
    cluster.reading = None
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert cluster.condition("Admitted")["status"] == "True"
    cluster.end_all()
    admitted = cluster.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "NotQueued")


def test_a_deactivated_workload_is_told_as_such() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
    cluster.active = False
    cluster.see()
    cluster.settle()
    assert "set it to true" in cluster.condition("Admitted")["message"]
    cluster.reading = None
    cluster.end_all()
    assert cluster.workload is not None
    assert cluster.workload.conditions["Requeued"][0] == "False"


def edit(cluster: QueuedCluster, group: str, **fields: Any) -> ReconcilePlan:
    """Edit a group as a user, and run the operator until nothing is left to do."""
    cluster.job["spec"][group] |= fields
    cluster.job["metadata"]["generation"] += 1
    return cluster.settle()


def running(**spec: Any) -> QueuedCluster:
    """Return a running job of a queue."""
    cluster = QueuedCluster(**spec)
    cluster.settle()
    cluster.admit()
    cluster.begin()
    return cluster


def test_a_job_that_grows_keeps_what_runs_and_says_why_it_does_not_grow() -> None:
    cluster = running()
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
    cluster = running(generation={"replicas": 3})
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
    cluster = running()
    edit(cluster, "generation", replicas=3)
    edit(cluster, "inference", replicas=2)
    assert "generation stays at 2 of 3 pods, inference at 1 of 2 pods" in cluster.condition("Admitted")["message"]
    cluster.ask_deletion("job-generation-1")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workers == EVERYBODY
    assert cluster.condition("Resizing")["reason"] == "LimitedByQueue"


def test_a_group_that_comes_or_goes_in_a_running_job_ends_no_pod() -> None:
    cluster = running(inference={"replicas": 0})
    before = cluster.workers
    edit(cluster, "inference", replicas=1)
    assert cluster.workers == before
    assert cluster.condition("Admitted")["status"] == "True"
    assert "inference stays at 0 of 1 pods" in cluster.condition("Admitted")["message"]
    edit(cluster, "inference", replicas=0)
    assert cluster.workers == before
    cluster = running()
    edit(cluster, "inference", replicas=0)
    cluster.finish_deletions()
    assert cluster.condition("Admitted")["status"] == "True"
    assert "generation-0" in cluster.workers


def test_a_job_that_grew_asks_for_all_when_it_is_resumed_or_evicted() -> None:
    for stop in ("suspend", "evict"):
        cluster = running()
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
        cluster = running()
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


def test_a_suspended_job_holds_no_quota_and_queues_again() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
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
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.begin()
    cluster.end("coordinator", 0)
    cluster.reading = None
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.workload is not None
    assert cluster.workload.conditions["Finished"][:2] == ("True", "Succeeded")
    assert cluster.settle().report is None


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
    cluster = running()
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


def test_a_job_of_another_controller_is_left_alone() -> None:
    cluster = QueuedCluster(managedBy="kueue.x-k8s.io/multikueue")
    assert cluster.plan() == ReconcilePlan()
    assert "status" not in cluster.job


def test_a_backend_that_is_not_there_is_told_and_nothing_is_made() -> None:
    cluster = SimulatedCluster(scheduling={"gang": {"mode": "Volcano"}})
    cluster.settle()
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "NotAvailableInThisCluster")
    assert "install Volcano" in planned["message"]
    assert cluster.workers == []


def test_native_groups_come_with_the_pods_and_a_lost_pod_joins_again() -> None:
    cluster = SimulatedCluster()
    cluster.served = EVERY_API
    cluster.settle()
    assert {kind for kind, _ in cluster.bodies} >= {
        f"scheduling.k8s.io/v1beta1/{item}" for item in ("Workload", "PodGroup")
    }
    cluster.run()
    cluster.ask_deletion("job-generation-0")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.pods["job-generation-0"]["spec"]["schedulingGroup"] == {"podGroupName": "job"}


def test_a_group_that_cannot_change_is_replaced_when_no_pod_is_left() -> None:
    cluster = SimulatedCluster()
    cluster.served = type(EVERY_API)(frozenset(["scheduling.k8s.io/v1alpha2"]))
    place = ("scheduling.k8s.io/v1alpha2/PodGroup", "job")
    cluster.settle()
    cluster.run()
    cluster.job["spec"]["inference"]["replicas"] = 0
    cluster.settle()
    assert cluster.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 5
    cluster.job["spec"]["suspend"] = True
    while cluster.pods:
        cluster.settle()
        cluster.finish_deletions()
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 4
    assert cluster.workers == [item for item in EVERYBODY if item != "inference-0"]


@pytest.mark.parametrize("mode", ["Disabled", "Auto"])
def test_without_a_gang_pods_are_those_of_before(mode: str) -> None:
    cluster, plain = SimulatedCluster(scheduling={"gang": {"mode": mode}}), SimulatedCluster()
    cluster.settle()
    plain.settle()
    assert {name: body["spec"] for name, body in cluster.pods.items()} == {
        name: body["spec"] for name, body in plain.pods.items()
    }


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
