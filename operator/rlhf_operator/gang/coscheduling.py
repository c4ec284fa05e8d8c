"""The gang of the coscheduling plugin: a PodGroup of scheduling.x-k8s.io, named in a pod label. Rule: pure.

Source: scheduler-plugins, API types scheduling/v1alpha1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.gang.apis import COSCHEDULING
from rlhf_operator.gang.backend import labelled, with_scheduler
from rlhf_operator.gang.members import min_count, min_resources, scheduler
from rlhf_operator.manifests import identity

Json = dict[str, Any]

SCHEDULER: Final = "scheduler-plugins-scheduler"
GROUP_LABEL: Final = "scheduling.x-k8s.io/pod-group"


@dataclass(frozen=True)
class CoschedulingBackend:
    """The backend for scheduling.x-k8s.io in one version."""

    version: str
    """apiVersion."""
    mode: str = COSCHEDULING
    makes_objects: bool = True
    immutable: bool = False

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the PodGroup."""
        spec: Json = {"minMember": min_count(job), "minResources": min_resources(job, pods)}
        if job.spec.scheduling.gang.timeout_seconds is not None:
            spec["scheduleTimeoutSeconds"] = job.spec.scheduling.gang.timeout_seconds
        meta = identity.metadata(job, job.name, identity.labels(job))
        return [{"apiVersion": self.version, "kind": "PodGroup", "metadata": meta, "spec": spec}]

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod with its group's label, for the scheduler that has the plugin."""
        return with_scheduler(labelled(pod, {GROUP_LABEL: job.name}), scheduler(job, SCHEDULER))
