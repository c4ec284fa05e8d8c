"""A job that runs without a revision gets one from what runs: nothing of it is made anew by that.

It was started by an operator that made no revisions, or somebody changed or deleted what held it. Taken over are the
images of the pods, the fingerprints by which they are up to date, what our container of each group was made with, the
resolved job that processes read, and what a queue admitted. What the user has changed since that was written is found
where the stored object says something else, and is changed.

Rule: pure. What runs belongs to a tenant, so nothing but our own container's part of a pod is taken from it, and every
pod that is made from it passes the same checks and guarantees as any other.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api import mode_words, protocol
from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.names import ANNOTATION_TEMPLATE, Group
from rlhf_operator.gang import members
from rlhf_operator.manifests import Images
from rlhf_operator.manifests.configuration import document, text_of
from rlhf_operator.manifests.identity import EPOCH, INDEX
from rlhf_operator.manifests.pods import CONTAINER
from rlhf_operator.manifests.rendering import group_sizes, template_hash
from rlhf_operator.reconcile.observed.observed_job import ObservedJob
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.stored_revision import RunningContainer
from rlhf_operator.reconcile.revisions.revision import (
    Revision,
    document_of,
    shapes,
    spares,
    spec_schema,
)
from rlhf_operator.reconcile.revisions.three_way_merge import adopted

Json = dict[str, Any]

_OF_IMAGE: Final = ("command", "args", "ports", "livenessProbe", "readinessProbe", "startupProbe")
"""Of a container that is adopted: what its image understands."""


def adopt(job: RLHFJob, stored: Json, status: Mapping[str, Any], observed: ObservedJob) -> Revision:
    """Return the revision of a job that runs; `stored` is what a revision keeps of the stored object."""
    written, base = document(job), document_of(observed.stored_revision)
    before = _of_document(base, written)
    if before is not None:
        spec = adopted(mode_words.present(base["spec"]), written["spec"], stored.get("spec") or {}, spec_schema())
        spec = mode_words.like(base["spec"], spec)
        written = {**base, "metadata": written["metadata"], "spec": spec}
    images = _images(job, status, observed)
    active = [pod for pod in observed.pods.values() if pod.active]
    hashes = {group: _hash(group, job, before, active) for group in group_sizes(job)}
    running = observed.stored_revision.running
    pods, others = (
        {group: _as_running(_hashed(pod, hashes[group]), running.get(group)) for group, pod in made.items()}
        for made in (shapes(job, images), spares(job, images))
    )
    requests_hash = members.requests_hash(job, pods) if members.counts(job).keys() <= pods.keys() else ""
    same = before is None or all(template_hash(before, group) == template_hash(job, group) for group in hashes)
    if observed.queue is not None and same:
        requests_hash = observed.queue.requests_hash or requests_hash
    return Revision(images, stored, text_of(written), pods, others, job.spec.training.ranks, hashes, requests_hash)


def _hash(group: Group, job: RLHFJob, before: RLHFJob | None, pods: list[ObservedPod]) -> str:
    """Return the template hash of the pods that run, or the present one where the user changed the template."""
    now = template_hash(job, group)
    if before is not None and template_hash(before, group) != now:
        return now
    ours = [pod for pod in pods if pod.group is group and pod.template_hash]
    if not ours or any(pod.template_hash == now for pod in ours):
        return now
    # While they are rolled the newest has the one that all shall have.
    return max(ours, key=lambda pod: (pod.created is not None, pod.created, pod.name)).template_hash


def _images(job: RLHFJob, status: Mapping[str, Any], observed: ObservedJob) -> Images:
    """Return the images by which the job was started: its status names them, or its pods do where their templates name
    none. Their user is the installation's, since whoever runs now may not be admitted any more.
    """
    said, user = status.get("revision") or {}, observed.images.user
    # The version before had one image for operators and coordinators.
    coordinators = said.get("coordinatorImage") or said.get("operatorImage")
    if coordinators and said.get("workerImage"):
        return Images(str(coordinators), str(said["workerImage"]), user, str(said.get("vllmWorkerImage") or ""))
    default = {group: _image(made) for group, made in shapes(job, Images(INDEX, INDEX, vllm_worker=EPOCH)).items()}
    running = {group: pod.image for group, pod in observed.stored_revision.running.items()}
    ours = {group: image for group, image in running.items() if default.get(group) == INDEX}
    workers = [image for group, image in ours.items() if group is not Group.COORDINATOR]
    coordinator = ours.get(Group.COORDINATOR, observed.images.coordinator)
    by_vllm = [image for group, image in running.items() if default.get(group) == EPOCH]
    vllm_worker = by_vllm[0] if by_vllm else observed.images.vllm_worker
    return Images(coordinator, workers[0] if workers else observed.images.worker, user, vllm_worker)


def _image(made: Json) -> str:
    return next(str(container["image"]) for container in _containers(made) if container["name"] == CONTAINER)


def _hashed(made: Json, template_hash: str) -> Json:
    meta = made["metadata"]
    annotations = {**meta["annotations"], ANNOTATION_TEMPLATE: template_hash}
    return {**made, "metadata": {**meta, "annotations": annotations}}


def _as_running(made: Json, running: RunningContainer | None) -> Json:
    """Return a pod with what belongs to the image of one that runs, and of the same template with what that one asks
    for.
    """
    if running is None or running.image != _image(made):
        return made
    rolled = running.template_hash != made["metadata"]["annotations"][ANNOTATION_TEMPLATE]
    containers = [
        _merged(container, running.container, rolled=rolled) if container["name"] == CONTAINER else container
        for container in _containers(made)
    ]
    return {**made, "spec": {**made["spec"], "containers": containers}}


def _merged(made: Json, running: Json, *, rolled: bool) -> Json:
    merged = {key: value for key, value in made.items() if key not in _OF_IMAGE}
    merged |= {key: running[key] for key in _OF_IMAGE if running.get(key)}
    if rolled:
        return merged
    if "resources" in running:
        merged["resources"] = running["resources"]
    values = {variable["name"]: variable.get("value") for variable in running.get("env") or []}
    merged["env"] = [_variable(variable, values.get(variable["name"])) for variable in made.get("env") or []]
    return merged


def _variable(made: Json, value: str | None) -> Json:
    """Return a variable with the value of the one that runs, unless that is of its pod's number, or no value."""
    of_place = "$(" in made.get("value", "$(")
    return made if value is None or of_place else {"name": made["name"], "value": value}


def _containers(made: Json) -> list[Json]:
    containers: list[Json] = made["spec"]["containers"]
    return containers


def _of_document(base: Json, now: Json) -> RLHFJob | None:
    """Return the job that an earlier version wrote for its processes; None when it cannot be read.

    A reward function is named there by the file it is mounted as, which no template depends on.
    """
    try:
        judges = [role.manifest_name for role in ModelRole if role.kind is ModelKind.REWARD]
        models = {name: now["spec"]["models"].get(name) for name in (*judges, "rewards")}
        spec = {**base["spec"], "models": {**base["spec"]["models"], **models}}
        return protocol.read_job({**base, "spec": spec})
    except (KeyError, TypeError, ValidationError, RecursionError):
        return None
