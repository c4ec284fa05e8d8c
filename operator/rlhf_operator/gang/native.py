"""The gang of Kubernetes' scheduler: Workload and PodGroup of scheduling.k8s.io, in the served version. Rule: pure.

In 1.35 (v1alpha1) the Workload contains the groups. From 1.36 (v1alpha2) it contains templates, and the PodGroup is a
separate object. 1.37 (v1beta1) renames the reference to the template and allows changes of the minimum. Sources:
KEP-4671, KEP-5832.
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
"""Name of the Workload's only group; all pods of a job are one gang."""


@dataclass(frozen=True)
class NativeBackend:
    """The backend for scheduling.k8s.io in one version."""

    version: str
    """apiVersion."""
    mode: str = NATIVE
    makes_objects: bool = True

    @property
    def immutable(self) -> bool:
        """Return whether the minimum is fixed: both alpha versions refuse to change it."""
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
        """Return the pod with the name of its group, and with the scheduler that the templates name."""
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
        """Return the group's priority class; empty if the job names none, and in the alpha versions."""
        name = job.spec.scheduling.priority_class_name
        return {"priorityClassName": name} if name and not self.immutable else {}

    def _object(self, job: RLHFJob, kind: str, spec: Json) -> Json:
        meta = identity.metadata(job, job.name, identity.labels(job))
        return {"apiVersion": self.version, "kind": kind, "metadata": meta, "spec": spec}
