"""A job with a queue: nothing before it is admitted, where its pods go then, what an eviction does, what is told."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_cluster import SimulatedCluster
from tests.unit.operator.test_gang import ALL, QUEUE

from rlhf_api import names
from rlhf_operator.gang.kueue_queue import KueueApi, QueuePriority
from rlhf_operator.gang.kueue_workload import PodPlacement, workload_of
from rlhf_operator.reconcile import ReconcilePlan
from rlhf_operator.reconcile.timestamps import rfc3339

Json = dict[str, Any]
PLACE = ("kueue.x-k8s.io/v1beta2/Workload", "rlhfjob-job")
EVERYBODY = ["coordinator", "generation-0", "generation-1", "inference-0", "training-0", "training-1"]


class QueuedCluster(SimulatedCluster):
    """A job of LocalQueue team, and Kueue's part of its Workload."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.served = ALL
        self.job["metadata"]["labels"] = {QUEUE: "team"}
        self.status: Json = {}
        self.active = True
        self.version = 0
        self.reports: list[list[str]] = []

    def carry_out(self, plan: ReconcilePlan, *, only_status: bool = False) -> None:
        super().carry_out(plan, only_status=only_status)
        if plan.report is not None and not only_status:
            self.reports.append(sorted(plan.report.conditions))
            self.status = KueueApi().with_report(self._body(), plan.report, rfc3339(self.now))["status"]
        if PLACE not in self.bodies:
            self.status = {}
        self.see()

    def _body(self) -> Json:
        self.version += 1
        body = copy.deepcopy(self.bodies[PLACE])
        body["metadata"] |= {"uid": "w", "resourceVersion": str(self.version)}
        body["spec"]["active"] = self.active
        return body | {"status": self.status}

    def see(self) -> None:
        """The watch delivers the Workload."""
        self.workload = workload_of(self._body()) if PLACE in self.bodies else None

    def condition_of_workload(self, kind: str, status: str, reason: str, message: str = "") -> None:
        kept = [each for each in self.status.get("conditions", []) if each["type"] != kind]
        moment = {"lastTransitionTime": rfc3339(self.now)}
        self.status["conditions"] = [
            *kept,
            {"type": kind, "status": status, "reason": reason, "message": message, **moment},
        ]
        self.see()

    def admit(self) -> None:
        """Kueue reserves quota in ClusterQueue gpus, flavor h200."""
        sets = self.bodies[PLACE]["spec"]["podSets"]
        assigned = [{"name": each["name"], "flavors": {"cpu": "h200"}, "count": each["count"]} for each in sets]
        self.status["admission"] = {"clusterQueue": "gpus", "podSetAssignments": assigned}
        self.condition_of_workload("Evicted", "False", "QuotaReserved")
        self.condition_of_workload("QuotaReserved", "True", "QuotaReserved")
        self.condition_of_workload("Admitted", "True", "Admitted")
        self.flavors = {"h200": PodPlacement({"gpu": "h200"}, ({"key": "gpu", "operator": "Exists"},))}

    def evict(self, reason: str = "Preempted") -> None:
        self.condition_of_workload("Evicted", "True", reason, "a workload of higher priority needs the room.")

    def end_all(self) -> list[list[str]]:
        """Turns and kubelets until nothing is left; who ended together."""
        waves = []
        while self.pods:
            self.settle()
            gone = sorted(name.removeprefix("job-") for name in self.finish_deletions())
            assert gone, "pods are left and nobody ends them"
            waves.append(gone)
        self.settle()
        return waves


def test_nothing_is_made_before_the_queue_admits_the_job() -> None:
    world = QueuedCluster()
    world.settle()
    assert list(world.bodies) == [PLACE]
    assert not world.certificates
    assert world.workers == []
    admitted = world.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "WaitingForQuota")
    assert "LocalQueue team" in admitted["message"]
    assert world.phase == "Queued"
    assert "startTime" not in world.job["status"]
    world.condition_of_workload("QuotaReserved", "False", "Pending", "couldn't assign flavors: insufficient quota.")
    world.later(11)
    world.settle()
    assert world.condition("Admitted")["message"].endswith("couldn't assign flavors: insufficient quota")


def test_a_workload_that_is_refused_is_told() -> None:
    world = QueuedCluster()
    world.refusals = {"rlhfjob-job": "forbidden"}
    plan = world.plan()
    world.carry_out(plan)
    assert world.condition("Admitted")["message"].endswith("rlhfjob-job is refused: forbidden")
    assert plan.requeue_after is not None


def test_the_workload_counts_every_pod_and_nothing_that_is_no_matter_of_quota() -> None:
    world = QueuedCluster()
    world.settle()
    body = world.bodies[PLACE]
    assert body["spec"]["queueName"] == "team"
    assert {each["name"]: each["count"] for each in body["spec"]["podSets"]} == {
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
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.settle()
    assert world.workers == EVERYBODY
    admitted = world.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("True", "QuotaReserved")
    assert "ClusterQueue gpus" in admitted["message"]
    for body in world.pods.values():
        assert body["spec"]["nodeSelector"] == {"gpu": "h200"}
        assert body["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert "QuotaReserved" in world.events


def test_a_job_queues_with_the_priority_of_its_class_and_not_while_that_cannot_be_read() -> None:
    world = QueuedCluster()
    world.priority = QueuePriority("WorkloadPriorityClass", "research", None)
    plan = world.settle()
    assert PLACE not in world.bodies
    assert "WorkloadPriorityClass research cannot be read" in world.condition("Admitted")["message"]
    assert plan.requeue_after is not None
    world.priority = QueuePriority("WorkloadPriorityClass", "research", 100)
    world.settle()
    spec = world.bodies[PLACE]["spec"]
    assert spec["priority"] == 100
    assert spec["priorityClassRef"] == {
        "group": "kueue.x-k8s.io",
        "kind": "WorkloadPriorityClass",
        "name": "research",
    }


def test_no_pod_is_made_while_a_flavor_cannot_be_read() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.flavors = {}
    plan = world.settle()
    assert world.workers == []
    assert "ResourceFlavor h200" in world.condition("Admitted")["message"]
    assert plan.requeue_after is not None


def test_an_evicted_job_saves_its_checkpoint_ends_and_gives_the_reservation_back() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.begin()
    assert world.reports == [["PodsReady"], ["PodsReady"]]
    world.evict()
    world.settle()
    assert world.condition("Admitted")["reason"] == "Evicted"
    assert "higher priority" in world.condition("Admitted")["message"]
    assert world.phase == "Checkpointing"
    assert world.status["admission"], "the pods still use it"
    world.reading = None
    assert world.end_all()[0] == ["coordinator"], "the checkpoint needs the ranks"
    assert "admission" not in world.status
    assert world.workload is not None
    assert {kind: world.workload.conditions[kind][0] for kind in ("QuotaReserved", "Admitted", "Requeued")} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Requeued": "True",
    }
    assert world.phase == "Queued"
    world.admit()
    world.settle()
    assert world.workers == EVERYBODY
    restarts = world.job["status"]["restarts"]
    assert (restarts["failures"], restarts["disruptions"]) == (0, 0)


def test_a_deactivated_workload_is_told_as_such() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.begin()
    world.active = False
    world.see()
    world.settle()
    assert "set it to true" in world.condition("Admitted")["message"]
    world.reading = None
    world.end_all()
    assert world.workload is not None
    assert world.workload.conditions["Requeued"][0] == "False"


def test_growing_asks_the_queue_anew_and_shrinking_does_not() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.begin()
    world.job["spec"]["generation"]["replicas"] = 1
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.condition("Admitted")["status"] == "True"
    world.finish_deletions()
    world.job["spec"]["generation"]["replicas"] = 3
    world.job["metadata"]["generation"] = 3
    world.settle()
    assert "generation is 3, not 2" in world.condition("Admitted")["message"]
    world.reading = None
    world.end_all()
    assert world.bodies[PLACE]["spec"]["podSets"][1]["count"] == 3
    assert world.status == {}, "the Workload is another one"
    world.admit()
    world.settle()
    assert len(world.workers) == 7


def test_a_job_that_waits_may_ask_for_another_size() -> None:
    world = QueuedCluster()
    world.settle()
    world.job["spec"]["generation"]["replicas"] = 5
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.bodies[PLACE]["spec"]["podSets"][1]["count"] == 5


def test_a_suspended_job_holds_no_quota_and_queues_again() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.begin()
    world.reading = None
    world.job["spec"]["suspend"] = True
    world.end_all()
    assert world.bodies.keys().isdisjoint([PLACE])
    assert world.phase == "Suspended"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.phase == "Queued"
    assert PLACE in world.bodies


def test_a_finished_job_frees_its_quota() -> None:
    world = QueuedCluster()
    world.settle()
    world.admit()
    world.begin()
    world.end("coordinator", 0)
    world.reading = None
    world.settle()
    world.finish_deletions()
    world.settle()
    assert world.workload is not None
    assert world.workload.conditions["Finished"][:2] == ("True", "Succeeded")
    assert world.settle().report is None


def test_a_job_of_another_controller_is_left_alone() -> None:
    world = QueuedCluster(managedBy="kueue.x-k8s.io/multikueue")
    assert world.plan() == ReconcilePlan()
    assert "status" not in world.job


def test_a_backend_that_is_not_there_is_told_and_nothing_is_made() -> None:
    world = SimulatedCluster(scheduling={"gang": {"mode": "Volcano"}})
    world.settle()
    planned = world.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "NotAvailableInThisCluster")
    assert "install Volcano" in planned["message"]
    assert world.workers == []


def test_native_groups_come_with_the_pods_and_a_lost_pod_joins_again() -> None:
    world = SimulatedCluster()
    world.served = ALL
    world.settle()
    assert {kind for kind, _ in world.bodies} >= {
        f"scheduling.k8s.io/v1beta1/{each}" for each in ("Workload", "PodGroup")
    }
    world.run()
    world.ask_deletion("job-generation-0")
    world.finish_deletions()
    world.settle()
    assert world.pods["job-generation-0"]["spec"]["schedulingGroup"] == {"podGroupName": "job"}


def test_a_group_that_cannot_change_is_replaced_when_no_pod_is_left() -> None:
    world = SimulatedCluster()
    world.served = type(ALL)(frozenset(["scheduling.k8s.io/v1alpha2"]))
    place = ("scheduling.k8s.io/v1alpha2/PodGroup", "job")
    world.settle()
    world.run()
    world.job["spec"]["inference"]["replicas"] = 0
    world.settle()
    assert world.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 5
    world.job["spec"]["suspend"] = True
    while world.pods:
        world.settle()
        world.finish_deletions()
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.bodies[place]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 4
    assert world.workers == [each for each in EVERYBODY if each != "inference-0"]


@pytest.mark.parametrize("mode", ["Disabled", "Auto"])
def test_without_a_gang_pods_are_those_of_before(mode: str) -> None:
    world, plain = SimulatedCluster(scheduling={"gang": {"mode": mode}}), SimulatedCluster()
    world.settle()
    plain.settle()
    assert {name: body["spec"] for name, body in world.pods.items()} == {
        name: body["spec"] for name, body in plain.pods.items()
    }


MOVES = st.lists(
    st.sampled_from(["admit", "evict", "grow", "shrink", "suspend", "resume", "kubelet", "run"]), max_size=12
)


@settings(max_examples=25, deadline=None)
@given(MOVES)
def test_whatever_happens_pods_exist_under_a_reservation_only_and_turns_come_to_rest(moves: list[str]) -> None:
    world = QueuedCluster()
    world.settle()
    for move in moves:
        replicas = world.job["spec"]["generation"]["replicas"]
        if move == "admit" and world.workload and not world.status.get("admission"):
            world.admit()
        elif move == "evict" and world.status.get("admission"):
            world.evict()
        elif move in ("grow", "shrink"):
            world.job["spec"]["generation"]["replicas"] = max(1, min(4, replicas + (1 if move == "grow" else -1)))
        elif move in ("suspend", "resume"):
            world.job["spec"]["suspend"] = move == "suspend"
        elif move == "kubelet":
            world.finish_deletions()
        elif move == "run":
            world.run()
        world.settle()
        if any("deletionTimestamp" not in body["metadata"] for body in world.pods.values()):
            assert world.status.get("admission"), move
        counts = world.workload.counts if world.workload else {}
        for group, count in counts.items():
            if world.status.get("admission"):
                assert (
                    sum(body["metadata"]["labels"][names.LABEL_GROUP] == group for body in world.pods.values()) <= count
                )
