"""The gang of Kubernetes' own scheduler: Workload and PodGroup of scheduling.k8s.io, in the version that is served.

Rule: pure. 1.35 (v1alpha1) has a Workload with the groups in it; from 1.36 on (v1alpha2) a Workload holds templates and
the PodGroup is an object of its own; 1.37 (v1beta1) names the template otherwise, and lets the minimum change.
Sources: KEP-4671, KEP-5832 and the API types of these releases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.gang.apis import NATIVE
from rlhf_operator.gang.backend import with_scheduler
from rlhf_operator.gang.members import min_count, scheduler
from rlhf_operator.manifests import identity

Json = dict[str, Any]

TEMPLATE: Final = "job"
"""Of the Workload's only group: whatever a job has runs in one gang."""


@dataclass(frozen=True)
class NativeBackend:
    """scheduling.k8s.io in one version."""

    version: str
    """apiVersion."""
    mode: str = NATIVE
    makes_objects: bool = True

    @property
    def immutable(self) -> bool:
        """Return whether the minimum is fixed: both alpha versions refuse any change of it."""
        return not self.version.endswith("/v1beta1")

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the Workload, and from 1.36 on the PodGroup."""
        policy = {"gang": {"minCount": min_count(job)}}
        owner = {"apiGroup": names.GROUP, "kind": names.KIND, "name": job.name}
        if self.version.endswith("/v1alpha1"):
            groups = [{"name": TEMPLATE, "policy": policy}]
            return [self._object(job, "Workload", {"controllerRef": owner, "podGroups": groups})]
        shared = {"schedulingPolicy": policy, **self._priority(job)}
        return [
            self._object(
                job, "Workload", {"controllerRef": owner, "podGroupTemplates": [{"name": TEMPLATE, **shared}]}
            ),
            self._object(job, "PodGroup", {**self._reference(job), **shared}),
        ]

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod with the name of its group; all pods of one must have the same scheduler."""
        if self.version.endswith("/v1alpha1"):
            group: Json = {"workloadRef": {"name": job.name, "podGroup": TEMPLATE}}
        else:
            group = {"schedulingGroup": {"podGroupName": job.name}}
        return with_scheduler({**pod, "spec": {**pod["spec"], **group}}, scheduler(job, None))

    def _reference(self, job: RLHFJob) -> Json:
        if self.version.endswith("/v1alpha2"):
            return {"podGroupTemplateRef": {"workload": {"workloadName": job.name, "podGroupTemplateName": TEMPLATE}}}
        return {"workloadRef": {"workloadName": job.name, "templateName": TEMPLATE}}

    def _priority(self, job: RLHFJob) -> Json:
        """Return the group's priority class. In 1.36 it needs a feature gate of its own, WorkloadAwarePreemption."""
        name = job.spec.scheduling.priority_class_name
        return {"priorityClassName": name} if name and not self.immutable else {}

    def _object(self, job: RLHFJob, kind: str, spec: Json) -> Json:
        meta = identity.metadata(job, job.name, identity.labels(job))
        return {"apiVersion": self.version, "kind": kind, "metadata": meta, "spec": spec}
