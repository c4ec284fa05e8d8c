"""The queue of Kueue: a Workload with a pod set for each group that has pods. Rule: pure.

A running elastic job asks for more pods with a second Workload, the slice that replaces the first one. Source: the API
types of kueue.x-k8s.io/v1beta2 and Kueue's page on custom jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.job.scheduling import ELASTIC_ANNOTATION, QUEUE_LABEL
from rlhf_common.names import LABEL_GROUP, Group
from rlhf_operator.gang.apis import KUEUE
from rlhf_operator.gang.backend import QueueAdmission, QueueGate, QueueState, labelled, with_scheduler
from rlhf_operator.gang.kueue_queue import KueueAdmission, KueueState, QueuePriority, gate
from rlhf_operator.gang.kueue_workload import REQUESTS_HASH, KueueWorkload, slice_name, workload_name
from rlhf_operator.gang.members import counts, elastic, quota_template, requests_hash, scheduler
from rlhf_operator.manifests import identity

Json = dict[str, Any]

KUEUE_GROUP: Final = "kueue.x-k8s.io"
PODSET_LABEL: Final = "kueue.x-k8s.io/podset"
REPLACES: Final = "kueue.x-k8s.io/workload-slice-replacement-for"
"""Annotation of a slice: the Workload that it replaces when it is admitted."""
JOB_UID_LABEL: Final = "kueue.x-k8s.io/job-uid"
"""Label of a Workload with the uid of its job; Kueue uses it in messages."""


@dataclass(frozen=True)
class KueueBackend:
    """The backend for kueue.x-k8s.io in one version."""

    version: str
    """apiVersion."""
    mode: str = KUEUE
    makes_objects: bool = True
    immutable: bool = False
    admission: KueueAdmission | None = None
    """Admission from which pods get their placement; None while the job's pods may not exist."""
    priority: QueuePriority | None = None
    requests_hash: str = ""
    """Hash of the requests in the job's revision; if empty, it is computed from the pods."""
    name: str = ""
    """Name of the job's Workload; empty while there is none."""
    slice: str = ""
    """Name of the Workload that asks for more pods; empty if the job asks for none."""

    def admit(self, job: RLHFJob, requests_hash: str, state: QueueState | None) -> QueueAdmission:
        """Return whether the job's pods may exist, according to its Workload."""
        kueue_state = state if isinstance(state, KueueState) else KueueState()
        workload, priority = kueue_state.workload, kueue_state.priority
        sizes = {group.value: count for group, count in counts(job).items()}
        decided = gate(queue_of(job) or "", workload, sizes, requests_hash, elastic(job), slices=kueue_state.elastic)
        backend = replace(self, priority=priority, requests_hash=requests_hash)
        if workload is not None:
            asks = decided.open and (workload.replaced or (bool(decided.limits) and kueue_state.elastic))
            backend, decided = _with_slice(job, backend, decided, workload, asks=asks)
        if priority is not None and priority.value is None and not decided.open:
            return QueueAdmission(backend, decided, f"{priority.kind} {priority.name} cannot be read")
        if workload is None or not decided.open:
            return QueueAdmission(backend, decided)
        admission = KueueAdmission(workload, kueue_state.flavors)
        unknown, blocked = admission.unknown_flavors, ""
        if unknown:
            blocked = f"ResourceFlavor {', '.join(unknown)}, which Kueue assigned, cannot be read"
        return QueueAdmission(replace(backend, admission=admission), decided, blocked)

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the Workload, and the slice that is to replace it if the job asks for more pods."""
        name = self.name or workload_name(job.name)
        workload = self._workload(job, pods, name, {})
        if not self.slice:
            return [workload]
        replaced = f"{identity.namespace(job)}/{name}"
        return [workload, self._workload(job, pods, self.slice, {ELASTIC_ANNOTATION: "true", REPLACES: replaced})]

    def _workload(self, job: RLHFJob, pods: Mapping[Group, Json], name: str, annotations: dict[str, str]) -> Json:
        meta = identity.metadata(job, name, identity.labels(job))
        if uid := job.metadata.get("uid"):
            meta["labels"][JOB_UID_LABEL] = str(uid)
        meta["annotations"] = {REQUESTS_HASH: self.requests_hash or requests_hash(job, pods), **annotations}
        spec = {"queueName": queue_of(job), "podSets": pod_sets(job, pods), **self._priority()}
        return {"apiVersion": self.version, "kind": "Workload", "metadata": meta, "spec": spec}

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod with the placement of its pod set. The template's own selectors win, because Kueue considered
        them.
        """
        group = str(pod["metadata"]["labels"][LABEL_GROUP])
        placement = self.admission.placement(group) if self.admission else None
        joined = with_scheduler(labelled(pod, {PODSET_LABEL: group}), scheduler(job, None))
        if placement is None:
            return joined
        spec = joined["spec"]
        more: Json = {}
        if selector := {**placement.node_selector, **(spec.get("nodeSelector") or {})}:
            more["nodeSelector"] = selector
        existing = list(spec.get("tolerations") or [])
        added = [dict(toleration) for toleration in placement.tolerations if dict(toleration) not in existing]
        if tolerations := [*existing, *added]:
            more["tolerations"] = tolerations
        merged = {**joined, "spec": {**spec, **more}}
        meta = merged["metadata"]
        # Our labels win: an admission check may add labels but must not change the ones that identify our pods.
        return labelled(
            merged, {**placement.labels, **meta["labels"]}, {**placement.annotations, **meta.get("annotations", {})}
        )

    def _priority(self) -> Json:
        if self.priority is None:
            return {}
        kind, name = self.priority.kind, self.priority.name
        group = KUEUE_GROUP if kind == "WorkloadPriorityClass" else "scheduling.k8s.io"
        if self.version.endswith("/v1beta1"):
            named: Json = {"priorityClassName": name, "priorityClassSource": f"{group}/{kind.lower()}"}
        else:
            named = {"priorityClassRef": {"group": group, "kind": kind, "name": name}}
        return {**named, "priority": self.priority.value}


def _with_slice(
    job: RLHFJob, backend: KueueBackend, decided: QueueGate, workload: KueueWorkload, *, asks: bool
) -> tuple[KueueBackend, QueueGate]:
    """Return the backend with the slice if the job `asks` for more pods, and the gate with the superseded Workload."""
    other = workload.other
    backend = replace(backend, name=workload.name)
    if other is not None and not other.going and not (asks and workload.awaited is not None):
        return backend, replace(decided, superseded=(other.name,))
    if not asks or (other is not None and other.going):
        return backend, decided
    first, second = workload_name(job.name), slice_name(job.name)
    return replace(backend, slice=second if workload.name == first else first), decided


def queue_of(job: RLHFJob) -> str | None:
    """Return the LocalQueue that the job's label names; None if it names none."""
    name = (job.metadata.get("labels") or {}).get(QUEUE_LABEL)
    return str(name) if name else None


def asked_by(job: RLHFJob) -> str:
    """Return the label that asks for Kueue, as text; empty if the job has none."""
    queue = queue_of(job)
    return "" if queue is None else f"the label {QUEUE_LABEL}: {queue}"


def lacks(job: RLHFJob) -> str:
    """Return the missing label that a queued job needs, as text; empty if nothing is missing."""
    if queue_of(job) is not None:
        return ""
    return f"needs the label {QUEUE_LABEL}: set it to the name of a LocalQueue of the namespace"


def pod_sets(job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
    """Return one pod set per group that has pods: its size, and the quota template of one of its pods."""
    return [
        {"name": group.value, "count": count, "template": quota_template(job, group, pods[group])}
        for group, count in counts(job).items()
    ]
