"""A simulated cluster with Kueue: the job has a LocalQueue, and the queue admits and evicts its Workload."""

import copy
from typing import Any

from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_operator.gang import ServedApis
from rlhf_operator.gang.apis import APIS
from rlhf_operator.gang.kueue_queue import KueueApi
from rlhf_operator.gang.kueue_workload import PodPlacement, current_workload, workload_of
from rlhf_operator.reconcile import ReconcilePlan
from rlhf_operator.reconcile.timestamps import rfc3339

Json = dict[str, Any]
WORKLOAD_KEY = ("kueue.x-k8s.io/v1beta2/Workload", "rlhfjob-job")
"""(kind, name) of the job's Workload."""
EVERY_API = ServedApis(frozenset(version for versions in APIS.values() for version, _ in versions))
"""The APIs of a cluster with all schedulers and queues, in all versions."""


class QueuedCluster(SimulatedCluster):
    """A job of LocalQueue team, and Kueue's part of its Workload."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.served = EVERY_API
        self.job["metadata"]["labels"] = {QUEUE_LABEL: "team"}
        self.statuses: dict[str, Json] = {}
        """Name of a Workload -> its status."""
        self.active = True
        self.version = 0
        self.reports: list[list[str]] = []

    @property
    def status(self) -> Json:
        """Return the status of the job's first Workload."""
        return self.statuses.setdefault(WORKLOAD_KEY[1], {})

    def carry_out(self, plan: ReconcilePlan, *, only_status: bool = False) -> None:
        super().carry_out(plan, only_status=only_status)
        if plan.report is not None and not only_status:
            self.reports.append(sorted(plan.report.conditions))
            for name in self.workloads:
                if plan.report.name in ("", name):
                    reported = KueueApi().with_report(self._body(name), plan.report, rfc3339(self.now))
                    self.statuses[name] = reported["status"]
        self.statuses = {name: status for name, status in self.statuses.items() if name in self.workloads}
        self.see()

    @property
    def workloads(self) -> list[str]:
        """Return the names of the job's Workloads."""
        return [name for kind, name in self.bodies if kind == WORKLOAD_KEY[0]]

    def _body(self, name: str = WORKLOAD_KEY[1]) -> Json:
        self.version += 1
        body = copy.deepcopy(self.bodies[WORKLOAD_KEY[0], name])
        body["metadata"] |= {"uid": f"uid-of-{name}", "resourceVersion": str(self.version)}
        body["spec"]["active"] = self.active
        return body | {"status": self.statuses.get(name, {})}

    def see(self) -> None:
        """Deliver the Workloads as a watch would."""
        seen = [workload_of(self._body(name)) for name in self.workloads]
        self.workload = current_workload(seen) if seen else None

    def condition_of_workload(
        self, kind: str, status: str, reason: str, message: str = "", name: str = WORKLOAD_KEY[1]
    ) -> None:
        workload_status = self.statuses.setdefault(name, {})
        others = [condition for condition in workload_status.get("conditions", []) if condition["type"] != kind]
        moment = {"lastTransitionTime": rfc3339(self.now)}
        workload_status["conditions"] = [
            *others,
            {"type": kind, "status": status, "reason": reason, "message": message, **moment},
        ]
        self.see()

    def admit(self, name: str = WORKLOAD_KEY[1]) -> None:
        """Let Kueue reserve quota in ClusterQueue gpus, flavor h200."""
        sets = self.bodies[WORKLOAD_KEY[0], name]["spec"]["podSets"]
        assigned = [{"name": item["name"], "flavors": {"cpu": "h200"}, "count": item["count"]} for item in sets]
        self.statuses.setdefault(name, {})["admission"] = {"clusterQueue": "gpus", "podSetAssignments": assigned}
        self.condition_of_workload("Evicted", "False", "QuotaReserved", name=name)
        self.condition_of_workload("QuotaReserved", "True", "QuotaReserved", name=name)
        self.condition_of_workload("Admitted", "True", "Admitted", name=name)
        self.flavors = {"h200": PodPlacement({"gpu": "h200"}, ({"key": "gpu", "operator": "Exists"},))}

    def evict(self, reason: str = "Preempted") -> None:
        self.condition_of_workload("Evicted", "True", reason, "a workload of higher priority needs the room.")

    def end_all(self) -> list[list[str]]:
        """Alternate reconciles and kubelets until no pod is left; return the pods that ended in each round."""
        waves = []
        while self.pods:
            self.settle()
            gone = sorted(name.removeprefix("job-") for name in self.finish_deletions())
            assert gone, "pods are left and nobody ends them"
            waves.append(gone)
        self.settle()
        return waves


def running_in_queue(**spec: Any) -> QueuedCluster:
    """Return a cluster whose job was admitted by its queue and runs."""
    cluster = QueuedCluster(**spec)
    cluster.settle()
    cluster.admit()
    cluster.begin()
    return cluster
