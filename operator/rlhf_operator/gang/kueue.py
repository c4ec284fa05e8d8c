"""The queue of Kueue: a Workload of our own with a pod set for each group; no pod before it is admitted.

Rule: pure. The pod sets hold what Kueue counts and places by, so that another image or another environment is no reason
to queue again. What it decided (`kueue_workload`) comes back as node selectors and tolerations of the pods.
Source: the API types of kueue.x-k8s.io/v1beta2 and Kueue's page on custom jobs.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_api.names import GROUP, LABEL_GROUP, Group
from rlhf_operator.gang.apis import KUEUE
from rlhf_operator.gang.backend import labelled, with_scheduler
from rlhf_operator.gang.kueue_workload import QueueDecision, QueuePriority
from rlhf_operator.gang.members import counts, scheduler
from rlhf_operator.manifests import identity

Json = dict[str, Any]

KUEUE_GROUP: Final = "kueue.x-k8s.io"
CLAIMS: Final = f"{GROUP}/claims"
"""Annotation of a Workload: fingerprint of what one pod of each group asks for."""
PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""Label of a job that names a WorkloadPriorityClass."""
PODSET_LABEL: Final = "kueue.x-k8s.io/podset"
_PLACED_BY: Final = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead", "resourceClaims")


@dataclass(frozen=True)
class KueueBackend:
    """kueue.x-k8s.io in one version."""

    version: str
    """apiVersion."""
    mode: str = KUEUE
    fixed: bool = False
    decision: QueueDecision | None = None
    """Where admitted pods go; None before there is an admission."""
    priority: QueuePriority | None = None
    claims: str = ""
    """Fingerprint of what one pod of each group asks for, where that is another one than `claims` computes."""

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """The Workload."""
        meta = identity.metadata(job, workload_name(job), identity.labels(job))
        meta["annotations"] = {CLAIMS: self.claims or claims(job, pods)}
        spec = {"queueName": queue_of(job), "podSets": pod_sets(job, pods), **self._priority()}
        return [{"apiVersion": self.version, "kind": "Workload", "metadata": meta, "spec": spec}]

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """The pod where its pod set was admitted to; the template's own selectors win, as Kueue chose by them."""
        group = str(pod["metadata"]["labels"][LABEL_GROUP])
        placed = self.decision.placement(group) if self.decision else None
        joined = with_scheduler(labelled(pod, {PODSET_LABEL: group}), scheduler(job, None))
        if placed is None:
            return joined
        spec = joined["spec"]
        more: Json = {}
        if selector := {**placed.node_selector, **(spec.get("nodeSelector") or {})}:
            more["nodeSelector"] = selector
        known = list(spec.get("tolerations") or [])
        if tolerations := [*known, *(dict(each) for each in placed.tolerations if dict(each) not in known)]:
            more["tolerations"] = tolerations
        merged = {**joined, "spec": {**spec, **more}}
        meta = merged["metadata"]
        # Ours win: an admission check may add labels, not take our pods away from us.
        return labelled(
            merged, {**placed.labels, **meta["labels"]}, {**placed.annotations, **meta.get("annotations", {})}
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


def priority_of(labels: Mapping[str, str], spec: Mapping[str, Any]) -> tuple[str, str] | None:
    """(kind, name) of the class that orders a stored job; Kueue's own wins."""
    if name := labels.get(PRIORITY_LABEL):
        return "WorkloadPriorityClass", name
    name = (spec.get("scheduling") or {}).get("priorityClassName")
    return ("PriorityClass", str(name)) if name else None


def queue_of(job: RLHFJob) -> str | None:
    """The LocalQueue that the job's label names."""
    name = (job.metadata.get("labels") or {}).get(QUEUE_LABEL)
    return str(name) if name else None


def workload_name(job: RLHFJob) -> str:
    """`rlhfjob-<job>`; Kueue's own integrations name theirs alike, by kind and job."""
    return workload_named(job.name)


def workload_named(name: str) -> str:
    """That of the job of this name."""
    return f"rlhfjob-{name}"


def pod_sets(job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
    """One for each group: its size, and what one of its pods asks for."""
    return [
        {"name": group.value, "count": count, "template": _template(job, group, pods[group])}
        for group, count in counts(job).items()
    ]


def claims(job: RLHFJob, pods: Mapping[Group, Json]) -> str:
    """Fingerprint of what the pods ask for, the number of pods aside; `pods`: one of each group."""
    listed = (group for group in Group if group in counts(job))
    asked: Mapping[str, Json] = {group.value: _template(job, group, pods[group]) for group in listed}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _template(job: RLHFJob, group: Group, made: Json) -> Json:
    """A pod as far as quota and placement are concerned."""
    spec = made["spec"]
    kept = {key: spec[key] for key in _PLACED_BY if spec.get(key)}
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            # An image is required, and says nothing here.
            kept[kind] = [
                {"name": each["name"], "image": "unused"}
                | ({"resources": each["resources"]} if each.get("resources") else {})
                for each in spec[kind]
            ]
    if name := job.spec.scheduling.priority_class_name:
        kept["priorityClassName"] = name
    return {"metadata": {"labels": {LABEL_GROUP: group.value}}, "spec": kept}
