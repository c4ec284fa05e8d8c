"""Renders the objects of a job, without those of its gang, in the order of their application: pods come last.

Rule: pure; the same job, certificates, images and epochs give the same objects.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import GroupFields
from rlhf_api.problems import Problem
from rlhf_api.rank_pods import rank_pods
from rlhf_common.names import ANNOTATION_TEMPLATE, Group
from rlhf_operator.manifests import engine_pods, identity
from rlhf_operator.manifests.configuration import configuration, secret
from rlhf_operator.manifests.identity import Number
from rlhf_operator.manifests.network import network_policy, services
from rlhf_operator.manifests.pods import CONTAINER, USER_ID, coordinator_pod, tell_grace, worker_pod
from rlhf_operator.manifests.template import TemplateError, check, merge_pod

Json = dict[str, Any]


_LIVE: Final[Mapping[str, Any]] = {
    "iterations": True,
    "fusion": True,
    "generation": {"max_batch_size", "engine_args", "speculation"},
    "inference": {"overlap", "incremental", "batch_tokens"},
    "training": {"schedule", "critic_overlap", "activation_checkpointing", "weight_sharing", "profile"},
    "checkpoints": {"every", "keep", "dtype"},
    "samples": True,
    "run_policy": {"worker_timeout_seconds", "start_timeout_seconds", "active_deadline_seconds"},
    "metrics": True,
}
"""Fields that may change in a live job and that its processes read at their start. Sizes are sent while they run."""


_HUB: Final = "HF_"
"""Prefix of the model hub's variables: its cache (HF_HOME) and its address and access (HF_ENDPOINT, HF_TOKEN)."""


@dataclass(frozen=True)
class Images:
    """Container images and their user; a template overrides both."""

    coordinator: str = "ghcr.io/rlhf-operator/coordinator:latest"
    worker: str = "ghcr.io/rlhf-operator/worker:latest"
    user: int | None = USER_ID
    """User and group, also of volumes. None leaves them to the cluster: OpenShift has a range for each namespace and
    refuses others.
    """
    vllm_worker: str = ""
    """Image of generation workers that may decode with vLLM. If empty, they use `worker`."""

    def of_worker(self, job: RLHFJob, group: Group) -> str:
        """Return the image of a group's workers."""
        return self.vllm_worker if self.vllm_worker and engine_pods.may_decode_by_vllm(job, group) else self.worker


@dataclass(frozen=True)
class RenderedObjects:
    """Objects of a job."""

    supporting: list[Json]
    """ConfigMap, Secret, Services, NetworkPolicy."""
    pods: list[Json] = field(default_factory=list)
    """Coordinator first, then generation, inference, training."""

    @property
    def all(self) -> list[Json]:
        """Return all objects in the order of their application."""
        return [*self.supporting, *self.pods]


def workers(job: RLHFJob) -> list[tuple[Group, int, GroupFields]]:
    """Return (group, number of pods, fields) of the groups that the algorithm's graph needs.

    A pod has one worker, or `ranksPerPod` training ranks.
    """
    spec = job.spec
    counts: list[tuple[Group, int, GroupFields]] = [
        (Group.GENERATION, spec.generation.replicas, spec.generation),
        (Group.INFERENCE, spec.inference.replicas, spec.inference),
    ]
    if spec.rank_group is Group.TRAINING:
        counts.append((Group.TRAINING, rank_pods(spec), spec.training))
    graph = graph_of(spec)
    return [entry for entry in counts if graph.tasks_of(entry[0])]


def group_sizes(job: RLHFJob) -> dict[Group, int]:
    """Return group -> number of pods: the coordinator, then the groups of `workers`."""
    return {Group.COORDINATOR: 1} | {group: count for group, count, _ in workers(job)}


def render(
    job: RLHFJob,
    certificates: Mapping[str, bytes],
    images: Images | None = None,
    epochs: Mapping[Group, int] | None = None,
) -> RenderedObjects:
    """Return the objects of a resolved job; `epochs` counts the restarts of each group. Raises TemplateError."""
    images, epochs = images or Images(), epochs or {}
    pods = [pod(job, Group.COORDINATOR, 0, images, epochs.get(Group.COORDINATOR, 0))]
    for group, count, _ in workers(job):
        pods += [pod(job, group, index, images, epochs.get(group, 0)) for index in range(count)]
    first, *others = plain(job)
    return RenderedObjects([first, secret(job, certificates), *others], pods)


def plain(job: RLHFJob, data: Mapping[str, str] | None = None, home: str = "") -> list[Json]:
    """Return the objects that pods need, without the Secret: ConfigMap, Services, NetworkPolicy.

    `data`: content of the ConfigMap, if not the job's. `home`: the operator's namespace.
    """
    return [configuration(job, data), *services(job), network_policy(job, home)]


def pod(job: RLHFJob, group: Group, index: Number, images: Images, epoch: Number = 0, mark: str = "") -> Json:
    """Return one pod of a resolved job. Raises TemplateError."""
    mark = mark or template_hash(job, group)
    if group is Group.COORDINATOR:
        return _coordinator(job, images, epoch, mark)
    labels = identity.labels(job, group, index, epoch)
    ours, template = (
        worker(job, group, index, images.of_worker(job, group), images.user),
        getattr(job.spec, group).template,
    )
    merged = merge_pod(ours, template, labels, f"spec.{group}.template")
    if group is job.spec.rank_group:
        tell_grace(merged)
    return _finished(job, merged, mark)


def worker(job: RLHFJob, group: Group, index: Number, image: str, user: int | None = USER_ID) -> Json:
    """Return a worker's pod before its template is merged in."""
    fields: GroupFields = getattr(job.spec, group)
    return worker_pod(job, group, index, fields, image, user)


def rank_template(job: RLHFJob) -> dict[str, Any]:
    """Return the user's template of the pods with training ranks."""
    template: dict[str, Any] = getattr(job.spec, job.spec.rank_group).template
    return template


def mounting(job: RLHFJob, image: str, labels: Mapping[str, str], user: int | None = USER_ID) -> Json:
    """Return the coordinator's pod before its own template is merged in."""
    if unused := unused_template(job):
        raise TemplateError(unused, "spec.training.template")
    template, path = rank_template(job), f"spec.{job.spec.rank_group}.template"
    check(template, path, worker(job, job.spec.rank_group, 0, image))
    spec = template.get("spec") or {}
    shared = {key: spec[key] for key in ("volumes", "imagePullSecrets", "securityContext") if key in spec}
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            hub = [
                variable for variable in container.get("env") or [] if str(variable.get("name", "")).startswith(_HUB)
            ]
            taken = {"volumeMounts": container.get("volumeMounts"), "env": hub}
            shared["containers"] = [{"name": CONTAINER, **{key: value for key, value in taken.items() if value}}]
    return merge_pod(coordinator_pod(job, image, user), {"spec": shared}, labels, path)


def unused_template(job: RLHFJob) -> list[Problem]:
    """Return the problem of a training template that is unused because another group's workers contain the ranks.

    The list is empty if there is none.
    """
    template = job.spec.training.template
    if job.spec.rank_group is Group.TRAINING or not _said(template):
        return []
    remedy = "creates no pod with spec.placement Colocated: move it to spec.generation.template"
    return [Problem("spec.training.template", template, remedy)]


def _coordinator(job: RLHFJob, images: Images, epoch: Number, mark: str) -> Json:
    labels = identity.labels(job, Group.COORDINATOR, 0, epoch)
    ours = mounting(job, images.coordinator, labels, images.user)
    merged = merge_pod(ours, job.spec.coordinator.template, labels, "spec.coordinator.template")
    return _finished(job, merged, mark)


def template_hash(job: RLHFJob, group: Group) -> str:
    """Return the hash by which a group's pods are recognised as outdated.

    Default values are omitted, so a new field changes no hash.
    """
    parts: list[Any] = [_said(getattr(job.spec, group).template)]
    if group is not Group.COORDINATOR and job.spec.metrics != "Enabled":
        parts.append({"metrics": job.spec.metrics})
    if group is Group.COORDINATOR:
        parts.append(_said(rank_template(job)))
        settings = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=dict(_LIVE))
        parts.append(_said(settings))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _said(value: Any) -> Any:
    """Return a value without empty entries: `{}`, `metadata: {}` and `containers: []` are the same template."""
    if isinstance(value, dict):
        pruned = {key: _said(entry) for key, entry in value.items()}
        return {key: entry for key, entry in pruned.items() if entry not in ({}, [], None)}
    return [_said(entry) for entry in value] if isinstance(value, list) else value


def _finished(job: RLHFJob, pod: Json, mark: str) -> Json:
    meta = identity.metadata(job, pod["metadata"]["name"], pod["metadata"]["labels"])
    annotations = pod["metadata"].get("annotations") or {}
    meta["annotations"] = {**annotations, ANNOTATION_TEMPLATE: mark}
    return {**pod, "metadata": meta}
