"""Kueue's Workload and what belongs to it, as far as decisions read them.

Rule: pure; what is read was written by others, and is bounded. What follows from it is decided in `kueue_queue`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from rlhf_common.names import GROUP
from rlhf_operator.untrusted import NAME_MAX, bounded, identity_of, listed, mapping, text, whole, wrong

REQUESTS_HASH: Final = f"{GROUP}/claims"
"""Annotation of a Workload: hash of what one pod of each group asks for (`members.requests_hash`)."""
SLICE_REPLACED: Final = "WorkloadSliceReplaced"
"""Reason of Finished of a Workload that a slice replaced."""
MESSAGE_MAX: Final = 32768
"""Characters of a condition's message, as the API server has it."""
PLACEMENT_MAX: Final = 256
"""Labels, annotations or tolerations that an admission gives to pods."""
VALUE_MAX: Final = 4096
"""Characters of each."""
COUNT_MAX: Final = 2**31 - 1
"""Of a pod set; a class orders by as much."""


@dataclass(frozen=True)
class PodPlacement:
    """What the pods of one pod set get by the admission."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


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
    requests_hash: str = ""
    """That of the pods it was made for."""
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
    other: "KueueWorkload | None" = None
    """A second Workload of the same job: the slice by which it asks for more pods, or the one that a slice replaced."""

    def holds(self, condition: str) -> bool:
        """Return whether a condition is True."""
        return self.conditions.get(condition, ("", "", ""))[0] == "True"

    @property
    def replaced(self) -> bool:
        """Return whether Kueue gave its reservation to a larger slice."""
        return self.holds("Finished") and self.conditions["Finished"][1] == SLICE_REPLACED

    def at_version(self, version: int) -> Self:
        """Return the same Workload under another resourceVersion."""
        return replace(self, version=version)

    def leaving(self) -> Self:
        """Return the same Workload as one that is being deleted."""
        return replace(self, going=True)


def workload_name(job_name: str) -> str:
    """Return `rlhfjob-<job>`; Kueue's own integrations name theirs alike, by kind and job."""
    return f"rlhfjob-{job_name}"


def slice_name(job_name: str) -> str:
    """Return `rlhfslice-<job>`, the name of a Workload that replaces the one above; that one's replaces it in turn."""
    return f"rlhfslice-{job_name}"


def current_workload(workloads: Sequence[KueueWorkload]) -> KueueWorkload:
    """Return the Workload that the pods of a job run under, or the one by which it waits, with the other one in it."""

    def rank(workload: KueueWorkload) -> tuple[bool, bool, bool, bool, int, bool]:
        reserved = bool(workload.cluster_queue) and not workload.going
        alive = not workload.going and not workload.holds("Finished")
        admitted = alive and reserved and workload.holds("Admitted") and not workload.holds("Evicted")
        # Kueue marks a Workload as replaced a moment before it admits the slice: the pods go on under it until then.
        replaced = reserved and workload.replaced
        # Two that are admitted: the larger one has replaced the other, which is not marked yet.
        size = sum(workload.counts.values()) if admitted else 0
        return admitted, replaced, alive, reserved, size, workload.name.startswith("rlhfjob-")

    first, *others = sorted(workloads, key=rank, reverse=True)
    return replace(first, other=others[0]) if others else first


def is_workload(kind: str) -> bool:
    """Return whether a kind, named with its apiVersion, is Kueue's Workload."""
    return kind.startswith("kueue.x-k8s.io/") and kind.endswith("/Workload")


def workload_of(body: Mapping[str, Any]) -> KueueWorkload:
    """Return the record of the API server's object. Raises UnreadableError."""
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
        requests_hash=_texts(meta.get("annotations"), "metadata.annotations").get(REQUESTS_HASH, ""),
        counts=_counts(listed(spec.get("podSets"), "spec.podSets")),
        conditions={
            text(condition.get("type"), "status.conditions.type", NAME_MAX, empty=False): (
                text(condition.get("status"), "status.conditions.status", NAME_MAX),
                text(condition.get("reason"), "status.conditions.reason", NAME_MAX),
                text(condition.get("message"), "status.conditions.message", MESSAGE_MAX),
            )
            for condition in conditions
        },
        cluster_queue=text(admission.get("clusterQueue"), "status.admission.clusterQueue", NAME_MAX),
        flavors=_flavors(admission),
        updates=_updates(listed(status.get("admissionChecks"), "status.admissionChecks")),
    )


def _counts(pod_sets: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    place = "spec.podSets"
    return {
        text(pod_set.get("name", "main"), f"{place}.name", NAME_MAX): whole(
            pod_set.get("count", 1), f"{place}.count", COUNT_MAX
        )
        for pod_set in pod_sets
    }


def _flavors(admission: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    place = "status.admission.podSetAssignments"
    return {
        text(assignment.get("name", "main"), f"{place}.name", NAME_MAX): tuple(
            dict.fromkeys(_texts(assignment.get("flavors"), f"{place}.flavors").values())
        )
        for assignment in listed(admission.get("podSetAssignments"), place)
    }


def _texts(value: Any, field: str) -> dict[str, str]:
    """Return a map of texts."""
    entries = mapping(value, field)
    if len(entries) > PLACEMENT_MAX:
        raise wrong(field, entries, f"an object of at most {PLACEMENT_MAX} texts")
    return {str(name): text(entry, f"{field}[{name}]", VALUE_MAX) for name, entry in entries.items()}


def flavor_of(body: Mapping[str, Any]) -> PodPlacement:
    """Return a ResourceFlavor as what it asks of pods. Raises UnreadableError."""
    bounded(body)
    spec = mapping(body.get("spec"), "spec")
    return PodPlacement(_texts(spec.get("nodeLabels"), "spec.nodeLabels"), _tolerations(spec, "spec"))


def _tolerations(value: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(listed(value.get("tolerations"), f"{field}.tolerations", PLACEMENT_MAX))


def priority_value(body: Mapping[str, Any]) -> int:
    """Return the value of a priority class. Raises UnreadableError."""
    value = body.get("value", 0)
    if type(value) is not int or abs(value) > COUNT_MAX:
        raise wrong("value", value, "a whole number of 32 bits")
    return value


def _updates(checks: Sequence[Mapping[str, Any]]) -> dict[str, PodPlacement]:
    place, placements = "status.admissionChecks.podSetUpdates", dict[str, PodPlacement]()
    for update in (pod_update for check in checks for pod_update in listed(check.get("podSetUpdates"), place)):
        name = text(update.get("name"), f"{place}.name", NAME_MAX, empty=False)
        before = placements.get(name, PodPlacement())
        placements[name] = PodPlacement(
            {**before.node_selector, **_texts(update.get("nodeSelector"), f"{place}.nodeSelector")},
            [*before.tolerations, *_tolerations(update, place)],
            {**before.labels, **_texts(update.get("labels"), f"{place}.labels")},
            {**before.annotations, **_texts(update.get("annotations"), f"{place}.annotations")},
        )
    return placements
