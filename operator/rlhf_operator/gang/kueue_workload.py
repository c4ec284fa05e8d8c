"""What Kueue says of a job's Workload, whether the job may run by it, and what it is told in return.

Rule: pure and level-triggered. A reservation belongs to the job until its pods are gone: an evicted job saves its
checkpoint and ends its pods first, and then gives the reservation back, which is the duty of a job's own controller
(Kueue's job framework does it for the kinds it knows). Nothing is decided on a condition's time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_api.conditions import AdmittedReason
from rlhf_operator.untrusted import NAME_MAX, bounded, identity_of, listed, mapping, text, whole, wrong

Json = dict[str, Any]

MESSAGE_MAX: Final = 32768
"""Characters of a condition's message, as the API server has it."""
PLACEMENT_MAX: Final = 256
"""Labels, annotations or tolerations that an admission gives to pods."""
VALUE_MAX: Final = 4096
"""Characters of each."""
COUNT_MAX: Final = 2**31 - 1
"""Of a pod set; a class orders by as much."""
REQUEUED_BY: Final = frozenset({"Preempted", "NodeFailures"})
"""Evictions after which the job may be admitted again at once; after others Kueue says when."""


@dataclass(frozen=True)
class PodPlacement:
    """What the pods of one pod set get by the admission."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QueuePriority:
    """The class by which Kueue orders a job among those that wait."""

    kind: str
    """WorkloadPriorityClass (Kueue's own, named by a label of the job) or PriorityClass (that of its pods)."""
    name: str
    value: int | None
    """None: the class cannot be read."""


@dataclass(frozen=True)
class KueueWorkload:
    """A Workload as far as decisions read it."""

    version: int
    uid: str
    name: str = ""
    owner: str = ""
    """uid of the object that controls it."""
    going: bool = False
    """It is being deleted, or of an earlier job of this name."""
    queue: str = ""
    active: bool = True
    claims: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Pod set -> pods asked for."""
    conditions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """Type -> (status, reason, message)."""
    cluster_queue: str = ""
    """The ClusterQueue whose quota is reserved; empty: none is."""
    flavors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pod set -> ResourceFlavors it was assigned."""
    updates: Mapping[str, PodPlacement] = field(default_factory=dict)
    """Pod set -> what admission checks add to its pods."""

    def holds(self, condition: str) -> bool:
        """A condition is True."""
        return self.conditions.get(condition, ("", "", ""))[0] == "True"


@dataclass(frozen=True)
class QueueDecision:
    """An admission with the flavors that it names."""

    workload: KueueWorkload
    flavors: Mapping[str, PodPlacement]
    """ResourceFlavor -> its node labels and tolerations, of those that could be read."""

    @property
    def unknown(self) -> list[str]:
        """Flavors that were assigned and could not be read."""
        named = {name for names in self.workload.flavors.values() for name in names}
        return sorted(named - self.flavors.keys())

    def placement(self, pod_set: str) -> PodPlacement:
        """Of all flavors and admission checks together."""
        parts = [self.flavors[name] for name in self.workload.flavors.get(pod_set, ()) if name in self.flavors]
        if pod_set in self.workload.updates:
            parts.append(self.workload.updates[pod_set])
        found = PodPlacement()
        for part in parts:
            found = PodPlacement(
                {**found.node_selector, **part.node_selector},
                [*found.tolerations, *(each for each in part.tolerations if each not in found.tolerations)],
                {**found.labels, **part.labels},
                {**found.annotations, **part.annotations},
            )
        return found


@dataclass(frozen=True)
class QueueGate:
    """Whether pods may exist."""

    open: bool
    reason: AdmittedReason
    message: str
    renew: bool = False
    """The Workload asks for something else than the job by now: another takes its place when no pod is left."""
    release: bool = False
    """The reservation is to be given back when no pod is left."""


@dataclass(frozen=True)
class WorkloadReport:
    """What Kueue is told: conditions of the Workload, and that the reservation is given back."""

    conditions: Mapping[str, tuple[str, str, str]]
    release: bool = False


def is_workload(kind: str) -> bool:
    """Whether a kind, named with its apiVersion, is Kueue's Workload."""
    return kind.startswith("kueue.x-k8s.io/") and kind.endswith("/Workload")


def workload_of(body: Mapping[str, Any], claims_key: str) -> KueueWorkload:
    """From the API server's object; `claims_key` is the annotation with the fingerprint. Raises UnreadableError."""
    bounded(body)
    known = identity_of(body.get("metadata"))
    meta, spec, status = body["metadata"], mapping(body.get("spec"), "spec"), mapping(body.get("status"), "status")
    admission = mapping(status.get("admission"), "status.admission")
    conditions = listed(status.get("conditions"), "status.conditions")
    return KueueWorkload(
        version=known.version,
        uid=known.uid,
        name=known.name,
        owner=known.owner,
        going=bool(meta.get("deletionTimestamp")),
        queue=text(spec.get("queueName"), "spec.queueName", NAME_MAX),
        active=spec.get("active") is not False,
        claims=_texts(meta.get("annotations"), "metadata.annotations").get(claims_key, ""),
        counts=_counts(listed(spec.get("podSets"), "spec.podSets")),
        conditions={
            text(each.get("type"), "status.conditions.type", NAME_MAX, empty=False): (
                text(each.get("status"), "status.conditions.status", NAME_MAX),
                text(each.get("reason"), "status.conditions.reason", NAME_MAX),
                text(each.get("message"), "status.conditions.message", MESSAGE_MAX),
            )
            for each in conditions
        },
        cluster_queue=text(admission.get("clusterQueue"), "status.admission.clusterQueue", NAME_MAX),
        flavors=_flavors(admission),
        updates=_updates(listed(status.get("admissionChecks"), "status.admissionChecks")),
    )


def _counts(pod_sets: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    place = "spec.podSets"
    return {
        text(each.get("name", "main"), f"{place}.name", NAME_MAX): whole(
            each.get("count", 1), f"{place}.count", COUNT_MAX
        )
        for each in pod_sets
    }


def _flavors(admission: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    place = "status.admission.podSetAssignments"
    return {
        text(each.get("name", "main"), f"{place}.name", NAME_MAX): tuple(
            dict.fromkeys(_texts(each.get("flavors"), f"{place}.flavors").values())
        )
        for each in listed(admission.get("podSetAssignments"), place)
    }


def _texts(value: Any, field: str) -> dict[str, str]:
    """A map of texts."""
    found = mapping(value, field)
    if len(found) > PLACEMENT_MAX:
        raise wrong(field, found, f"an object of at most {PLACEMENT_MAX} texts")
    return {str(name): text(each, f"{field}[{name}]", VALUE_MAX) for name, each in found.items()}


def flavor_of(body: Mapping[str, Any]) -> PodPlacement:
    """A ResourceFlavor as what it asks of pods. Raises UnreadableError."""
    bounded(body)
    spec = mapping(body.get("spec"), "spec")
    return PodPlacement(_texts(spec.get("nodeLabels"), "spec.nodeLabels"), _tolerations(spec, "spec"))


def _tolerations(value: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(listed(value.get("tolerations"), f"{field}.tolerations", PLACEMENT_MAX))


def priority_value(body: Mapping[str, Any]) -> int:
    """Of a priority class. Raises UnreadableError."""
    value = body.get("value", 0)
    if type(value) is not int or abs(value) > COUNT_MAX:
        raise wrong("value", value, "a whole number of 32 bits")
    return value


def gate(queue: str, workload: KueueWorkload | None, counts: Mapping[str, int], claims: str) -> QueueGate:
    """`counts`: pods the job wants of each group; `claims`: fingerprint of what they ask for."""
    asks = f"asks LocalQueue {queue} for {sum(counts.values())} pods"
    if workload is None:
        return QueueGate(False, AdmittedReason.WAITING, f"{asks}; Kueue has not looked at it yet")
    if workload.going:
        return QueueGate(False, AdmittedReason.WAITING, f"{asks} when its Workload of before is gone")
    reserved = bool(workload.cluster_queue)
    if workload.holds("Evicted") or not workload.active:
        return QueueGate(False, AdmittedReason.EVICTED, _evicted(queue, workload), release=reserved)
    if workload.holds("Finished"):
        told = f"{asks} anew, as its Workload was marked as finished by somebody else"
        return QueueGate(False, AdmittedReason.WAITING, told, renew=True)
    if not reserved or not workload.holds("Admitted"):
        return QueueGate(False, AdmittedReason.WAITING, f"{asks}: {_why_not(workload)}")
    more = {name: count for name, count in counts.items() if count > workload.counts.get(name, 0)}
    if workload.claims != claims:
        return QueueGate(
            False, AdmittedReason.WAITING, f"{asks} anew, as its pods ask for something else now", renew=True
        )
    if more or queue != workload.queue:
        why = ", ".join(f"{name} is {count}, not {workload.counts.get(name, 0)}" for name, count in more.items())
        told = f"{asks} anew: {why or f'it was admitted through {workload.queue}'}"
        return QueueGate(False, AdmittedReason.WAITING, told, renew=True)
    return QueueGate(
        True, AdmittedReason.ADMITTED, f"LocalQueue {queue}: ClusterQueue {workload.cluster_queue} has room"
    )


def report(gate: QueueGate, workload: KueueWorkload, *, pods: bool, ready: bool) -> WorkloadReport | None:
    """What the Workload's status should say besides; None when it does. `pods`: any are left."""
    if gate.open:
        known = workload.conditions.get("PodsReady", ("", "", ""))
        if ready == (known[0] == "True") and known[0]:
            return None
        reason = "Started" if ready else "WaitForRecovery" if known[0] == "True" else "WaitForStart"
        told = "all pods that an iteration needs are ready" if ready else "pods that an iteration needs are not ready"
        return WorkloadReport({"PodsReady": (str(ready), reason, told)})
    if gate.release and not pods:
        reason, message = workload.conditions.get("Evicted", ("", "Deactivated", "The workload is deactivated"))[1:]
        return WorkloadReport(
            {
                "Requeued": (str(reason in REQUEUED_BY), reason, message),
                "QuotaReserved": ("False", "Pending", message),
                "Admitted": ("False", "NoReservation", "The workload has no reservation"),
            },
            release=True,
        )
    return None


def finished(workload: KueueWorkload, message: str, *, succeeded: bool) -> WorkloadReport | None:
    """Told once when the job has ended, which frees its quota."""
    if workload.holds("Finished"):
        return None
    return WorkloadReport({"Finished": ("True", "Succeeded" if succeeded else "Failed", message)})


def with_report(body: Json, report: WorkloadReport, now: str) -> Json:
    """The Workload with the report in its status; times of conditions that do not change are kept.

    Raises UnreadableError.
    """
    bounded(body)
    meta, status = mapping(body.get("metadata"), "metadata"), dict(mapping(body.get("status"), "status"))
    known = {str(each.get("type")): each for each in listed(status.get("conditions"), "status.conditions")}
    for kind, (value, reason, message) in report.conditions.items():
        before = known.get(kind, {})
        moved = before.get("status") != value
        known[kind] = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": now if moved else before.get("lastTransitionTime") or now,
            "observedGeneration": meta.get("generation", 1),
        }
    status["conditions"] = list(known.values())
    if report.release:
        status.pop("admission", None)
    return {**body, "status": status}


def _why_not(workload: KueueWorkload) -> str:
    """In Kueue's own words."""
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


def _updates(checks: Sequence[Mapping[str, Any]]) -> dict[str, PodPlacement]:
    place, found = "status.admissionChecks.podSetUpdates", dict[str, PodPlacement]()
    for update in (each for check in checks for each in listed(check.get("podSetUpdates"), place)):
        name = text(update.get("name"), f"{place}.name", NAME_MAX, empty=False)
        before = found.get(name, PodPlacement())
        found[name] = PodPlacement(
            {**before.node_selector, **_texts(update.get("nodeSelector"), f"{place}.nodeSelector")},
            [*before.tolerations, *_tolerations(update, place)],
            {**before.labels, **_texts(update.get("labels"), f"{place}.labels")},
            {**before.annotations, **_texts(update.get("annotations"), f"{place}.annotations")},
        )
    return found
