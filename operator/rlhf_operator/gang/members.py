"""The members of a gang: the number of pods that must fit at once, their requests and their scheduler. Rule: pure.

docs/decisions/operator.md#0004-make-the-gang-as-small-as-an-iteration-allows has the minimum.
"""

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.rank_pods import rank_pods
from rlhf_common.names import LABEL_GROUP, Group
from rlhf_operator.gang.pod_requests import is_sidecar, pod_level_requests, pod_requests
from rlhf_operator.manifests.quantity import written
from rlhf_operator.manifests.rendering import Images, group_sizes, pod, workers

Json = dict[str, Any]

DEFAULT_SCHEDULER: Final = "default-scheduler"
_PLACED_BY: Final = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead", "resourceClaims")


def counts(job: RLHFJob) -> dict[Group, int]:
    """Return the number of pods of each group that has any, the coordinator first."""
    return {Group.COORDINATOR: 1} | {group: count for group, count, _ in workers(job) if count}


def minimum(job: RLHFJob) -> dict[Group, int]:
    """Return the number of pods of each group that the job needs to start."""
    ranks = {job.spec.rank_group: rank_pods(job.spec)}
    return {group: min(count, ranks.get(group, 1)) for group, count in counts(job).items()}


def elastic(job: RLHFJob) -> frozenset[Group]:
    """Return the groups whose size may change while the job runs."""
    return frozenset({Group.GENERATION, Group.INFERENCE} - {job.spec.rank_group})


def min_count(job: RLHFJob) -> int:
    """Return the number of pods that must fit at once."""
    return sum(minimum(job).values())


def examples(job: RLHFJob) -> dict[Group, Json]:
    """Return one pod of each group that has any, with the default images. Raises TemplateError."""
    return {group: pod(job, group, 0, Images()) for group in counts(job)}


def min_resources(job: RLHFJob, pods: Mapping[Group, Json]) -> dict[str, str]:
    """Return the total requests of the minimum, by resource. `pods` has one pod of each group."""
    total: dict[str, Decimal] = {}
    for group, count in minimum(job).items():
        for name, asked in pod_requests(pods[group]["spec"]).items():
            total[name] = total.get(name, Decimal(0)) + count * asked
    return {name: written(amount) for name, amount in sorted(total.items())}


def requests_hash(job: RLHFJob, pods: Mapping[Group, Json]) -> str:
    """Return the hash of the pods' requests and placement, without the number of pods.

    `pods` has one pod of each group, also of a group of size 0.
    """
    listed = [group for group in group_sizes(job) if group in pods]
    asked: Mapping[str, Json] = {group.value: quota_template(job, group, pods[group]) for group in listed}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def quota_template(job: RLHFJob, group: Group, pod: Json) -> Json:
    """Return the parts of a pod that matter for quota and placement, so that another image does not queue the job
    again.
    """
    spec = pod["spec"]
    quota_spec = {key: spec[key] for key in _PLACED_BY if spec.get(key)}
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            # The image is required and has no effect here.
            quota_spec[kind] = [
                {"name": container["name"], "image": "unused"}
                | ({"resources": container["resources"]} if container.get("resources") else {})
                | ({"restartPolicy": "Always"} if kind == "initContainers" and is_sidecar(container) else {})
                for container in spec[kind]
            ]
    if asked := pod_level_requests(spec):
        # The requests include those that the API server derives from the pod's own limits.
        quota_spec["resources"] = {"requests": asked}
    if name := job.spec.scheduling.priority_class_name:
        quota_spec["priorityClassName"] = name
    return {"metadata": {"labels": {LABEL_GROUP: group.value}}, "spec": quota_spec}


def schedulers(job: RLHFJob) -> set[str]:
    """Return the schedulers that the pod templates name."""
    templates = (job.spec.coordinator, job.spec.generation, job.spec.inference, job.spec.training)
    schedulers_named = ((fields.template.get("spec") or {}).get("schedulerName") for fields in templates)
    return {str(name) for name in schedulers_named if name}


def scheduler(job: RLHFJob, default: str | None) -> str | None:
    """Return the scheduler of all pods: that of the templates, else `default`. None leaves it to the cluster."""
    return next(iter(schedulers(job)), default)
