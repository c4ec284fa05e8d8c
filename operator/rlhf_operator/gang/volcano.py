"""The gang of Volcano: a PodGroup of scheduling.volcano.sh, named in an annotation of every pod.

Rule: pure. Source: the API types of volcano.sh/apis, scheduling/v1beta1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.gang.apis import VOLCANO
from rlhf_operator.gang.backend import labelled, with_scheduler
from rlhf_operator.gang.members import min_count, min_resources, scheduler
from rlhf_operator.manifests import identity

Json = dict[str, Any]

SCHEDULER: Final = "volcano"
GROUP_ANNOTATION: Final = "scheduling.k8s.io/group-name"
"""Annotation with the PodGroup of a pod; Volcano's constant KubeGroupNameAnnotationKey."""


@dataclass(frozen=True)
class VolcanoBackend:
    """The backend for scheduling.volcano.sh in one version."""

    version: str
    """apiVersion."""
    mode: str = VOLCANO
    makes_objects: bool = True
    immutable: bool = False

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the PodGroup."""
        scheduling = job.spec.scheduling
        spec: Json = {"minMember": min_count(job), "minResources": min_resources(job, pods)}
        if scheduling.gang.queue:
            spec["queue"] = scheduling.gang.queue
        if scheduling.priority_class_name:
            spec["priorityClassName"] = scheduling.priority_class_name
        meta = identity.metadata(job, job.name, identity.labels(job))
        return [{"apiVersion": self.version, "kind": "PodGroup", "metadata": meta, "spec": spec}]

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod with the name of its group, for Volcano's scheduler or the one in its template."""
        return with_scheduler(labelled(pod, {}, {GROUP_ANNOTATION: job.name}), scheduler(job, SCHEDULER))
