"""Decides whether a job may run from the state of its Workload, and what to report to Kueue.

Rule: pure and level-triggered.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rlhf_api.job.scheduling import ELASTIC_ANNOTATION, QUEUE_LABEL
from rlhf_common.conditions import AdmittedReason
from rlhf_operator.gang.apis import PRIORITY_CLASS
from rlhf_operator.gang.backend import QueueGate, QueueObject, Reference, WorkloadReport
from rlhf_operator.gang.kueue_workload import (
    KueueWorkload,
    PodPlacement,
    current_workload,
    flavor_of,
    is_workload,
    priority_value,
    slice_name,
    workload_name,
    workload_of,
)
from rlhf_operator.untrusted import bounded, listed, mapping

Json = dict[str, Any]

PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""Label of a job that names a WorkloadPriorityClass."""
REQUEUED_BY: Final = frozenset({"Preempted", "NodeFailures"})
"""Reasons of evictions after which the job may be admitted again at once."""
WAIT_FOR_START: Final = "WaitForStart"
"""Reason of PodsReady while the pods of an admission have not been ready yet, or without an admission."""
REPORT_MESSAGE_MAX: Final = 32768
"""Characters of a condition's message that the API server accepts."""


@dataclass(frozen=True)
class QueuePriority:
    """The class that determines the job's order in the queue."""

    kind: str
    """WorkloadPriorityClass (Kueue's own, from a label of the job) or PriorityClass (that of its pods)."""
    name: str
    value: int | None
    """Value of the class; None if it cannot be read."""


@dataclass(frozen=True)
class KueueAdmission:
    """An admission with the flavors that it names."""

    workload: KueueWorkload
    flavors: Mapping[str, PodPlacement]
    """ResourceFlavor -> its node labels and tolerations, for the flavors that could be read."""

    @property
    def unknown_flavors(self) -> list[str]:
        """Return the assigned flavors that could not be read."""
        named = {name for names in self.workload.flavors.values() for name in names}
        return sorted(named - self.flavors.keys())

    def placement(self, pod_set: str) -> PodPlacement:
        """Return the placement of a pod set, merged from its flavors and admission checks."""
        parts = [self.flavors[name] for name in self.workload.flavors.get(pod_set, ()) if name in self.flavors]
        if pod_set in self.workload.updates:
            parts.append(self.workload.updates[pod_set])
        merged = PodPlacement()
        for part in parts:
            added = [toleration for toleration in part.tolerations if toleration not in merged.tolerations]
            merged = PodPlacement(
                {**merged.node_selector, **part.node_selector},
                [*merged.tolerations, *added],
                {**merged.labels, **part.labels},
                {**merged.annotations, **part.annotations},
            )
        return merged


@dataclass(frozen=True)
class KueueState:
    """Kueue's state for a job."""

    workload: KueueWorkload | None = None
    flavors: Mapping[str, PodPlacement] = field(default_factory=dict)
    """ResourceFlavors of the admission by name, if they could be read."""
    priority: QueuePriority | None = None
    """Priority; None if the job names no class or has no queue, or if Kueue cannot be used."""
    elastic: bool = False
    """Whether the job may grow by a larger slice that replaces its Workload."""

    @property
    def _workloads(self) -> list[KueueWorkload]:
        return [] if self.workload is None else [self.workload, *filter(None, [self.workload.other])]

    def reserves(self, name: str) -> bool:
        """Return whether quota is reserved for the Workload of that name, or it is being deleted."""
        return any(item.name == name and bool(item.cluster_queue or item.going) for item in self._workloads)

    @property
    def requests_hash(self) -> str:
        """Return the hash of the requests in the Workload; empty if there is none."""
        return self.workload.requests_hash if self.workload is not None else ""

    def report(self, gate: QueueGate, *, pods_left: bool, ready: bool) -> WorkloadReport | None:
        """Return the changes of the Workload's status; None if it is up to date or there is none."""
        if self.workload is None:
            return None
        if gate.open:
            return _pods_ready(self.workload, ready=ready)
        conditions: dict[str, tuple[str, str, str]] = {}
        if self.workload.holds("PodsReady"):
            conditions["PodsReady"] = ("False", WAIT_FOR_START, "the pods end, as the workload is not admitted")
        release = gate.release and not pods_left
        if release:
            conditions |= _given_back(self.workload)
        return WorkloadReport(conditions, release, self.workload.name) if conditions else None

    def finished_report(self, message: str, *, succeeded: bool) -> WorkloadReport | None:
        """Return the report of a job that has ended; None if every Workload is Finished or is being deleted."""
        if all(item.going or item.holds("Finished") for item in self._workloads):
            return None
        return WorkloadReport({"Finished": ("True", "Succeeded" if succeeded else "Failed", message)})


class KueueApi:
    """Reads Workloads, ResourceFlavors and priority classes, and writes Workloads."""

    def reads(self, kind: str) -> bool:
        """Return whether `kind`, with its apiVersion, is Kueue's Workload."""
        return is_workload(kind)

    def object_names(self, job_name: str) -> tuple[str, str]:
        """Return the names of the Workloads of a job of this name."""
        return workload_name(job_name), slice_name(job_name)

    def current(self, objects: Sequence[QueueObject]) -> QueueObject:
        """Return the Workload that the job's pods run under, or that it waits for."""
        return current_workload([item for item in objects if isinstance(item, KueueWorkload)])

    def parse(self, body: Mapping[str, Any]) -> KueueWorkload:
        """Return the record of a Workload. Raises UnreadableError."""
        return workload_of(body)

    def references(
        self, version: str, stored: Mapping[str, Any], queue_object: QueueObject | None
    ) -> Sequence[Reference]:
        """Return the flavors that the admission names, and the priority class of the job."""
        named = (
            {name for names in queue_object.flavors.values() for name in names}
            if isinstance(queue_object, KueueWorkload)
            else ()
        )
        flavors = [(f"{version}/ResourceFlavor", name) for name in named]
        priority = _priority_of(stored)
        if priority is None:
            return flavors
        kind, name = priority
        return [*flavors, (PRIORITY_CLASS if kind == "PriorityClass" else f"{version}/{kind}", name)]

    def parse_reference(self, kind: str, body: Mapping[str, Any]) -> PodPlacement | int:
        """Return the placement of a flavor, or the value of a class. Raises UnreadableError."""
        return flavor_of(body) if kind.endswith("/ResourceFlavor") else priority_value(body)

    def state(
        self, stored: Mapping[str, Any], queue_object: QueueObject | None, records: Mapping[Reference, object]
    ) -> KueueState:
        """Return Kueue's state for a job."""
        flavors = {name: record for (_, name), record in records.items() if isinstance(record, PodPlacement)}
        priority = _priority_of(stored)
        values = [
            record if isinstance(record, int) else None
            for (kind, _), record in records.items()
            if not kind.endswith("/ResourceFlavor")
        ]
        known_priority = QueuePriority(*priority, values[0]) if priority is not None and values else None
        annotations = stored["metadata"].get("annotations") or {}
        elastic = annotations.get(ELASTIC_ANNOTATION) == "true"
        return KueueState(
            queue_object if isinstance(queue_object, KueueWorkload) else None, flavors, known_priority, elastic
        )

    def with_report(self, body: Json, report: WorkloadReport, now: str) -> Json:
        """Return the Workload with the report in its status; a condition with an unchanged status keeps its time.

        Raises UnreadableError.
        """
        bounded(body)
        meta, status = mapping(body.get("metadata"), "metadata"), dict(mapping(body.get("status"), "status"))
        conditions = {str(entry.get("type")): entry for entry in listed(status.get("conditions"), "status.conditions")}
        for kind, (value, reason, message) in report.conditions.items():
            before = conditions.get(kind, {})
            moved = before.get("status") != value
            conditions[kind] = {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message[:REPORT_MESSAGE_MAX],
                "lastTransitionTime": now if moved else before.get("lastTransitionTime") or now,
                "observedGeneration": meta.get("generation", 1),
            }
        status["conditions"] = list(conditions.values())
        if report.release:
            status.pop("admission", None)
        return {**body, "status": status}


def gate(
    queue: str,
    workload: KueueWorkload | None,
    counts: Mapping[str, int],
    requests_hash: str,
    elastic: Collection[str] = (),
    *,
    slices: bool = False,
) -> QueueGate:
    """Return whether a job's pods may exist.

    `counts`: pods that the job wants, by group. `elastic`: groups that may have fewer pods. `slices`: a larger slice
    may replace the Workload.
    """
    named = f"LocalQueue {queue}"
    asks = f"asks {named} for {sum(counts.values())} pods"
    closed = partial(QueueGate, False, queue=named)
    if workload is None:
        return closed(AdmittedReason.WAITING, f"{asks}; Kueue has not looked at it yet")
    if workload.going:
        return closed(AdmittedReason.WAITING, f"{asks} when its earlier Workload is gone")
    reserved = bool(workload.cluster_queue)
    if workload.holds("Evicted") or not workload.active:
        return closed(AdmittedReason.EVICTED, _evicted(queue, workload), release=reserved)
    if workload.holds("Finished") and not (workload.replaced and workload.other is not None):
        message = f"{asks} anew, because somebody else marked its Workload as finished"
        return closed(AdmittedReason.WAITING, message, renew=True)
    if not reserved or not workload.holds("Admitted"):
        return closed(AdmittedReason.WAITING, f"{asks}: {_why_not(workload)}")
    if workload.requests_hash != requests_hash:
        message = f"{asks} anew, as its pods ask for something else now"
        return closed(AdmittedReason.WAITING, message, renew=True)
    limits = {name: admitted for name, count in counts.items() if count > (admitted := workload.counts.get(name, 0))}
    if fixed := [name for name in limits if name not in elastic]:
        why = ", ".join(f"{name} is {counts[name]}, not {limits[name]}" for name in fixed)
        return closed(AdmittedReason.WAITING, f"{asks} anew: {why}", renew=True)
    if queue != workload.queue:
        message = f"{asks} anew: it was admitted through {workload.queue}"
        return closed(AdmittedReason.WAITING, message, renew=True)
    limited = _limited(named, counts, limits, workload.awaited, slices=slices) if limits else ""
    message = ". ".join(filter(None, [f"{named}: ClusterQueue {workload.cluster_queue} has room", limited]))
    return QueueGate(True, AdmittedReason.ADMITTED, message, named, limits, limited)


def _limited(
    queue: str, counts: Mapping[str, int], limits: Mapping[str, int], awaited: KueueWorkload | None, *, slices: bool
) -> str:
    """Return why groups do not grow. `awaited`: the slice that waits."""
    stays = ", ".join(f"{name} at {admitted} of {counts[name]} pods" for name, admitted in limits.items())
    stays = stays.replace(" at ", " stays at ", 1)
    if slices:
        why = "Kueue has not looked at it yet" if awaited is None else _why_not(awaited)
        return f"{stays}: the job has asked {queue} for all, and keeps its present pods meanwhile: {why}"
    return (
        f"{stays}: {queue} has admitted no more, and the job keeps what it has. "
        "Suspend the job and resume it to ask for all"
    )


def _given_back(workload: KueueWorkload) -> dict[str, tuple[str, str, str]]:
    """Return the conditions of a Workload whose reservation is released: it was evicted or deactivated."""
    reason, message = workload.conditions.get("Evicted", ("", "Deactivated", "The workload is deactivated"))[1:]
    return {
        "Requeued": (str(reason in REQUEUED_BY), reason, message),
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
    }


def _pods_ready(workload: KueueWorkload, *, ready: bool) -> WorkloadReport | None:
    status = workload.conditions.get("PodsReady", ("", "", ""))[0]
    if ready == (status == "True") and status:
        return None
    reason = "Started" if ready else "WaitForRecovery" if status == "True" else WAIT_FOR_START
    message = "all pods that an iteration needs are ready" if ready else "pods that an iteration needs are not ready"
    return WorkloadReport({"PodsReady": (str(ready), reason, message)}, name=workload.name)


def _why_not(workload: KueueWorkload) -> str:
    """Return Kueue's message about why there is no admission, or a general one."""
    for kind in ("Admitted", "QuotaReserved"):
        status, _, message = workload.conditions.get(kind, ("", "", ""))
        if status == "False" and message:
            return message.rstrip(".")
    return "admission checks are not done" if workload.cluster_queue else "no quota is reserved yet"


def _evicted(queue: str, workload: KueueWorkload) -> str:
    reason, message = workload.conditions.get("Evicted", ("", "", ""))[1:]
    if not workload.active:
        return f"LocalQueue {queue}: the Workload is deactivated (its spec.active is false): set it to true to go on"
    return (
        f"LocalQueue {queue} took the admission back ({reason}: {message.rstrip('.')}); the job waits to get it again"
    )


def _priority_of(stored: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (kind, name) of the class that orders a stored job in a queue; Kueue's own class wins.

    None: the job has no label of a queue, or names no class.
    """
    labels, spec = stored["metadata"].get("labels") or {}, stored.get("spec") or {}
    if QUEUE_LABEL not in labels:
        return None
    if name := labels.get(PRIORITY_LABEL):
        return "WorkloadPriorityClass", name
    name = (spec.get("scheduling") or {}).get("priorityClassName")
    return ("PriorityClass", str(name)) if name else None
