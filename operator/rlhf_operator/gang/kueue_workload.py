"""Records of Kueue's Workload and related objects, with the fields that decisions read. Rule: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from rlhf_common.names import GROUP
from rlhf_operator.untrusted import NAME_MAX, bounded, identity_of, listed, mapping, text, whole, wrong

REQUESTS_HASH: Final = f"{GROUP}/claims"
"""Annotation of a Workload: hash of the requests of one pod of each group (`members.requests_hash`)."""
SLICE_REPLACED: Final = "WorkloadSliceReplaced"
"""Reason of Finished for a Workload that a slice replaced."""
MESSAGE_MAX: Final = 32768
"""Most characters of a condition's message that are read."""
PLACEMENT_MAX: Final = 256
"""Most entries of a map of texts, such as labels, and of a list of tolerations."""
VALUE_MAX: Final = 4096
"""Most characters of a text in such a map that are read."""
COUNT_MAX: Final = 2**31 - 1
"""Largest count of a pod set, and largest absolute value of a priority."""


@dataclass(frozen=True)
class PodPlacement:
    """Fields that an admission adds to the pods of a pod set."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KueueWorkload:
    """The fields of a Workload that decisions read."""

    version: int
    uid: str
    name: str = ""
    owner: str = ""
    """uid of the object that controls it."""
    going: bool = False
    """Whether it is being deleted, or has another owner than the job."""
    queue: str = ""
    active: bool = True
    requests_hash: str = ""
    """Hash of the requests of the pods that it was created for."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Pod set -> requested pods."""
    conditions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """Type -> (status, reason, message)."""
    cluster_queue: str = ""
    """ClusterQueue whose quota is reserved; empty if none is."""
    flavors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pod set -> assigned ResourceFlavors."""
    updates: Mapping[str, PodPlacement] = field(default_factory=dict)
    """Pod set -> additions of admission checks to its pods."""
    other: "KueueWorkload | None" = None
    """Second Workload of the same job: the slice that asks for more pods, or the one that a slice replaced."""

    def holds(self, condition: str) -> bool:
        """Return whether a condition is True."""
        return self.conditions.get(condition, ("", "", ""))[0] == "True"

    @property
    def replaced(self) -> bool:
        """Return whether Kueue gave its reservation to a larger slice."""
        return self.holds("Finished") and self.conditions["Finished"][1] == SLICE_REPLACED

    @property
    def awaited(self) -> "KueueWorkload | None":
        """Return the slice that asks for more pods, or that has replaced this Workload and waits for admission checks;
        else None.
        """
        other = self.other
        if other is None or other.going or other.holds("Finished"):
            return None
        return other if self.replaced or not other.cluster_queue else None

    def at_version(self, version: int) -> Self:
        """Return the same Workload with another resourceVersion."""
        return replace(self, version=version)

    def leaving(self) -> Self:
        """Return the same Workload, marked as being deleted."""
        return replace(self, going=True)


def workload_name(job_name: str) -> str:
    """Return `rlhfjob-<job>`, the name of the job's first Workload."""
    return f"rlhfjob-{job_name}"


def slice_name(job_name: str) -> str:
    """Return `rlhfslice-<job>`, the name of a slice. The two names alternate when one replaces the other."""
    return f"rlhfslice-{job_name}"


def current_workload(workloads: Sequence[KueueWorkload]) -> KueueWorkload:
    """Return the Workload that the pods run under or that the job waits for, with the other one as its `other`."""

    def rank(workload: KueueWorkload) -> tuple[bool, bool, bool, bool, int, bool]:
        reserved = bool(workload.cluster_queue) and not workload.going
        alive = not workload.going and not workload.holds("Finished")
        admitted = alive and reserved and workload.holds("Admitted") and not workload.holds("Evicted")
        # A replaced Workload with a reservation counts until the slice is admitted.
        replaced = reserved and workload.replaced
        # If two are admitted, the larger one counts.
        size = sum(workload.counts.values()) if admitted else 0
        return admitted, replaced, alive, reserved, size, workload.name.startswith("rlhfjob-")

    first, *others = sorted(workloads, key=rank, reverse=True)
    return replace(first, other=others[0]) if others else first


def is_workload(kind: str) -> bool:
    """Return whether a kind, with its apiVersion, is Kueue's Workload."""
    return kind.startswith("kueue.x-k8s.io/") and kind.endswith("/Workload")


def workload_of(body: Mapping[str, Any]) -> KueueWorkload:
    """Return the record of the API server's object. Raises UnreadableError."""
    bounded(body)
    identity = identity_of(body.get("metadata"))
    meta, spec, status = body["metadata"], mapping(body.get("spec"), "spec"), mapping(body.get("status"), "status")
    admission = mapping(status.get("admission"), "status.admission")
    conditions = listed(status.get("conditions"), "status.conditions")
    return KueueWorkload(
        version=identity.version,
        uid=identity.uid,
        name=identity.name,
        owner=identity.owner,
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
    """Return a map of bounded texts. Raises UnreadableError."""
    entries = mapping(value, field)
    if len(entries) > PLACEMENT_MAX:
        raise wrong(field, entries, f"an object of at most {PLACEMENT_MAX} texts")
    return {str(name): text(entry, f"{field}[{name}]", VALUE_MAX) for name, entry in entries.items()}


def flavor_of(body: Mapping[str, Any]) -> PodPlacement:
    """Return the placement that a ResourceFlavor adds to pods. Raises UnreadableError."""
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
