"""What Kueue says of a job's Workload, whether the job may run by it, and what it is told in return.

Rule: pure and level-triggered. A reservation belongs to the job until its pods are gone: an evicted job saves its
checkpoint and ends its pods first, and then gives the reservation back, which is the duty of a job's own controller
(Kueue's job framework does it for the kinds it knows). Nothing is decided on a condition's time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_api.conditions import AdmittedReason

Json = dict[str, Any]

REQUEUED_BY: Final = frozenset({"Preempted", "NodeFailures"})
"""Evictions after which the job may be admitted again at once; after others Kueue says when."""


@dataclass(frozen=True)
class Placement:
    """What the pods of one pod set get by the admission."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Priority:
    """The class by which Kueue orders a job among those that wait."""

    kind: str
    """WorkloadPriorityClass (Kueue's own, named by a label of the job) or PriorityClass (that of its pods)."""
    name: str
    value: int | None
    """None: the class cannot be read."""


@dataclass(frozen=True)
class Workload:
    """A Workload as far as decisions read it."""

    version: int
    uid: str
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
    updates: Mapping[str, Placement] = field(default_factory=dict)
    """Pod set -> what admission checks add to its pods."""

    def holds(self, condition: str) -> bool:
        """A condition is True."""
        return self.conditions.get(condition, ("", "", ""))[0] == "True"


@dataclass(frozen=True)
class Decision:
    """An admission with the flavors that it names."""

    workload: Workload
    flavors: Mapping[str, Placement]
    """ResourceFlavor -> its node labels and tolerations, of those that could be read."""

    @property
    def unknown(self) -> list[str]:
        """Flavors that were assigned and could not be read."""
        named = {name for names in self.workload.flavors.values() for name in names}
        return sorted(named - self.flavors.keys())

    def placement(self, pod_set: str) -> Placement:
        """Of all flavors and admission checks together."""
        parts = [self.flavors[name] for name in self.workload.flavors.get(pod_set, ()) if name in self.flavors]
        if pod_set in self.workload.updates:
            parts.append(self.workload.updates[pod_set])
        found = Placement()
        for part in parts:
            found = Placement(
                {**found.node_selector, **part.node_selector},
                [*found.tolerations, *(each for each in part.tolerations if each not in found.tolerations)],
                {**found.labels, **part.labels},
                {**found.annotations, **part.annotations},
            )
        return found


@dataclass(frozen=True)
class Gate:
    """Whether pods may exist."""

    open: bool
    reason: AdmittedReason
    message: str
    renew: bool = False
    """The Workload asks for something else than the job by now: another takes its place when no pod is left."""
    release: bool = False
    """The reservation is to be given back when no pod is left."""


@dataclass(frozen=True)
class Report:
    """What Kueue is told: conditions of the Workload, and that the reservation is given back."""

    conditions: Mapping[str, tuple[str, str, str]]
    release: bool = False


def is_workload(kind: str) -> bool:
    """Whether a kind, named with its apiVersion, is Kueue's Workload."""
    return kind.startswith("kueue.x-k8s.io/") and kind.endswith("/Workload")


def workload_of(body: Mapping[str, Any], claims_key: str) -> Workload:
    """From the API server's object; `claims_key` is the annotation with the fingerprint."""
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    admission = status.get("admission") or {}
    assigned = admission.get("podSetAssignments") or []
    return Workload(
        version=int(meta["resourceVersion"]),
        uid=str(meta["uid"]),
        going=bool(meta.get("deletionTimestamp")),
        queue=str(spec.get("queueName") or ""),
        active=spec.get("active") is not False,
        claims=str((meta.get("annotations") or {}).get(claims_key, "")),
        counts={str(each.get("name", "main")): int(each.get("count", 1)) for each in spec.get("podSets") or []},
        conditions={
            str(each["type"]): (str(each["status"]), str(each.get("reason", "")), str(each.get("message", "")))
            for each in status.get("conditions") or []
        },
        cluster_queue=str(admission.get("clusterQueue") or ""),
        flavors={
            str(each.get("name", "main")): tuple(dict.fromkeys((each.get("flavors") or {}).values()))
            for each in assigned
        },
        updates=_updates(status.get("admissionChecks") or []),
    )


def flavor_of(body: Mapping[str, Any]) -> Placement:
    """A ResourceFlavor as what it asks of pods."""
    spec = body.get("spec") or {}
    return Placement(dict(spec.get("nodeLabels") or {}), tuple(spec.get("tolerations") or ()))


def gate(queue: str, workload: Workload | None, counts: Mapping[str, int], claims: str) -> Gate:
    """`counts`: pods the job wants of each group; `claims`: fingerprint of what they ask for."""
    asks = f"asks LocalQueue {queue} for {sum(counts.values())} pods"
    if workload is None:
        return Gate(False, AdmittedReason.WAITING, f"{asks}; Kueue has not looked at it yet")
    if workload.going:
        return Gate(False, AdmittedReason.WAITING, f"{asks} when its Workload of before is gone")
    reserved = bool(workload.cluster_queue)
    if workload.holds("Evicted") or not workload.active:
        return Gate(False, AdmittedReason.EVICTED, _evicted(queue, workload), release=reserved)
    if workload.holds("Finished"):
        told = f"{asks} anew, as its Workload was marked as finished by somebody else"
        return Gate(False, AdmittedReason.WAITING, told, renew=True)
    if not reserved or not workload.holds("Admitted"):
        return Gate(False, AdmittedReason.WAITING, f"{asks}: {_why_not(workload)}")
    more = {name: count for name, count in counts.items() if count > workload.counts.get(name, 0)}
    if workload.claims != claims:
        return Gate(False, AdmittedReason.WAITING, f"{asks} anew, as its pods ask for something else now", renew=True)
    if more or queue != workload.queue:
        why = ", ".join(f"{name} is {count}, not {workload.counts.get(name, 0)}" for name, count in more.items())
        told = f"{asks} anew: {why or f'it was admitted through {workload.queue}'}"
        return Gate(False, AdmittedReason.WAITING, told, renew=True)
    return Gate(True, AdmittedReason.ADMITTED, f"LocalQueue {queue}: ClusterQueue {workload.cluster_queue} has room")


def report(gate: Gate, workload: Workload, *, pods: bool, ready: bool) -> Report | None:
    """What the Workload's status should say besides; None when it does. `pods`: any are left."""
    if gate.open:
        known = workload.conditions.get("PodsReady", ("", "", ""))
        if ready == (known[0] == "True") and known[0]:
            return None
        reason = "Started" if ready else "WaitForRecovery" if known[0] == "True" else "WaitForStart"
        told = "all pods that an iteration needs are ready" if ready else "pods that an iteration needs are not ready"
        return Report({"PodsReady": (str(ready), reason, told)})
    if gate.release and not pods:
        reason, message = workload.conditions.get("Evicted", ("", "Deactivated", "The workload is deactivated"))[1:]
        return Report(
            {
                "Requeued": (str(reason in REQUEUED_BY), reason, message),
                "QuotaReserved": ("False", "Pending", message),
                "Admitted": ("False", "NoReservation", "The workload has no reservation"),
            },
            release=True,
        )
    return None


def finished(workload: Workload, message: str, *, succeeded: bool) -> Report | None:
    """Told once when the job has ended, which frees its quota."""
    if workload.holds("Finished"):
        return None
    return Report({"Finished": ("True", "Succeeded" if succeeded else "Failed", message)})


def with_report(body: Json, report: Report, now: str) -> Json:
    """The Workload with the report in its status; times of conditions that do not change are kept."""
    status = dict(body.get("status") or {})
    known = {each["type"]: each for each in status.get("conditions") or []}
    for kind, (value, reason, message) in report.conditions.items():
        before = known.get(kind, {})
        moved = before.get("status") != value
        known[kind] = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": now if moved else before["lastTransitionTime"],
            "observedGeneration": body["metadata"].get("generation", 1),
        }
    status["conditions"] = list(known.values())
    if report.release:
        status.pop("admission", None)
    return {**body, "status": status}


def _why_not(workload: Workload) -> str:
    """In Kueue's own words."""
    for kind in ("Admitted", "QuotaReserved"):
        status, _, message = workload.conditions.get(kind, ("", "", ""))
        if status == "False" and message:
            return message.rstrip(".")
    return "admission checks are not done" if workload.cluster_queue else "no quota is reserved yet"


def _evicted(queue: str, workload: Workload) -> str:
    reason, message = workload.conditions.get("Evicted", ("", "", ""))[1:]
    if not workload.active:
        return f"LocalQueue {queue}: the Workload is deactivated (its spec.active is false): set it to true to go on"
    return (
        f"LocalQueue {queue} took the admission back ({reason}: {message.rstrip('.')}); the job waits to get it again"
    )


def _updates(checks: Sequence[Mapping[str, Any]]) -> dict[str, Placement]:
    found: dict[str, Placement] = {}
    for update in (each for check in checks for each in check.get("podSetUpdates") or []):
        name, before = str(update["name"]), found.get(str(update["name"]), Placement())
        found[name] = Placement(
            {**before.node_selector, **(update.get("nodeSelector") or {})},
            [*before.tolerations, *(update.get("tolerations") or [])],
            {**before.labels, **(update.get("labels") or {})},
            {**before.annotations, **(update.get("annotations") or {})},
        )
    return found
