"""Decides when a job gets another revision: at a start, by its user's edits, and if its revision is lost. Rule: pure.

After a start, edits are applied to the revision, and the rest stays. This version parses both jobs, before and after an
edit, so a new default is not an edit. A running job whose revision is lost gets one of this version, with the images
that its status names, unless its manifest is refused.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api import manifest, protocol
from rlhf_api.job import RLHFJob
from rlhf_api.structural_schema import pruned, schema_at, with_defaults, without_nulls
from rlhf_common.names import Group
from rlhf_common.nesting import too_deep
from rlhf_operator.bounded_cache import cached
from rlhf_operator.gang import members
from rlhf_operator.gang.apis import kind_of
from rlhf_operator.manifests import Images
from rlhf_operator.manifests.configuration import document, text_of
from rlhf_operator.manifests.rendering import group_sizes, plain, template_hash
from rlhf_operator.reconcile.last_applied import fingerprint
from rlhf_operator.reconcile.observed.observed_job import ObservedJob
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision
from rlhf_operator.reconcile.parsed_job import REMEMBERED, ParsedJob, parse_job
from rlhf_operator.reconcile.revisions.revision import (
    Revision,
    digest,
    digests,
    shapes,
    spares,
    spec_schema,
    trusted,
)
from rlhf_operator.reconcile.revisions.three_way_merge import carried, prune_unknown
from rlhf_operator.stored_job import UNREADABLE

Json = dict[str, Any]

_STORED: Final = ("name", "namespace", "uid", "labels")
"""Metadata of a job that its objects are created from."""
_PODS_ROOT: Final = Path("/")


@dataclass(frozen=True)
class PinnedJob(ParsedJob):
    """A parsed job with the revision that it runs with."""

    stored_revision: StoredRevision = field(default_factory=StoredRevision)
    """The job's revision; empty if there is none."""
    status: Mapping[str, str] = field(default_factory=dict)
    """`status.revision`."""
    hashes: Mapping[Group, str] = field(default_factory=dict)
    """Hashes by which outdated pods are recognised."""
    fingerprints: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(kind, name) -> fingerprint of the objects that pods need, without the Secret."""
    note: str = ""
    """Note for the user about the revision."""
    settled: bool = False
    """Whether the job's ConfigMap already has this revision."""

    @property
    def revision(self) -> Revision | None:
        """Return the unpacked revision, to create pods or objects from it; None if there is none."""
        return trusted(self.stored_revision, (self.status.get("digest", ""),))


def pin_revision(parsed: ParsedJob, stored: Mapping[str, Any], observed: ObservedJob) -> PinnedJob:
    """Return a stored job with its revision, or without one if its manifest is refused."""
    if parsed.job is None and (stored.get(UNREADABLE) or too_deep(dict(stored))):
        return _without(parsed)
    status, images = stored.get("status") or {}, observed.images
    if observed.pods or status.get("startTime"):
        pinned = _from_stored(_text(stored), observed.stored_revision, digests(status), observed.home)
        if pinned is not None:
            return pinned
        images = _started_by(status, images)
    if not parsed.planned:
        return _without(parsed)
    return _started(_text(stored), images, observed.home)


def _started_by(status: Mapping[str, Any], images: Images) -> Images:
    """Return the images that a job's status names; `images`, unless it names both. The user is the installation's."""
    said = status.get("revision") or {}
    coordinator, worker = said.get("coordinatorImage"), said.get("workerImage")
    if not coordinator or not worker:
        return images
    return Images(coordinator, worker, images.user, said.get("vllmWorkerImage") or "")


def _without(parsed: ParsedJob) -> PinnedJob:
    return PinnedJob(parsed.job, parsed.problem, parsed.reason)


@cached(REMEMBERED)
def _started(text: str, images: Images, home: str) -> PinnedJob:
    """Return the job with a revision of this version."""
    stored = json.loads(text)
    job = parse_job(stored).job
    assert job is not None
    pods, hashes = shapes(job, images), {group: template_hash(job, group) for group in group_sizes(job)}
    ranks = job.spec.training.ranks
    requests_hash = members.requests_hash(job, pods)
    written = text_of(document(job))
    return _pinned_job(
        job, Revision(images, stored, written, pods, spares(job, images), ranks, hashes, requests_hash), home
    )


@cached(REMEMBERED)
def _from_stored(text: str, stored_revision: StoredRevision, vouched: tuple[str, ...], home: str) -> PinnedJob | None:
    """Return the job with its revision and its user's edits; None if it has none."""
    revision = trusted(stored_revision, vouched)
    if revision is None:
        return None
    stored = json.loads(text)
    parsed = parse_job(stored)
    now, then = parsed.job if parsed.planned else read(stored), read(revision.job)
    if now is None:
        return _without(parsed)
    changed: Revision | None = None
    if then is None or then.spec == now.spec:
        changed = replace(revision, job=stored, document=_with_metadata(revision.document, now))
    elif _problem(stored) in ("", _problem(revision.job)):
        changed = _edited(then, now, stored, revision)
    if changed is None:
        return replace(_pinned_job(now, revision, home), job=parsed.job, problem=parsed.problem, reason=parsed.reason)
    pinned = _pinned_job(now, changed, home)
    if parsed.problem:
        pinned = replace(pinned, note="; ".join(filter(None, [_goes_on(parsed), pinned.note])))
    before = digest(stored_revision.data)
    if before == pinned.status["digest"]:
        return replace(pinned, settled=True)
    return replace(pinned, status={**pinned.status, "previousDigest": before})


def _problem(stored: Json) -> str:
    """Return the problems of a job, without those of fields that this version does not know."""
    return parse_job({**stored, "spec": pruned(stored["spec"], spec_schema())}).problem


def _edited(then: RLHFJob, now: RLHFJob, stored: Json, revision: Revision) -> Revision | None:
    """Return `revision` with its user's edits; None if a group would have pods that cannot be created."""
    images = revision.images
    computed = {group: (template_hash(then, group), template_hash(now, group)) for group in group_sizes(now)}
    hashes = {group: revision.hashes.get(group, new) if old == new else new for group, (old, new) in computed.items()}
    changed = {group for group, (old, new) in computed.items() if old != new}
    pods = _carried(revision.pods, shapes(then, images), shapes(now, images), changed)
    others = _carried(revision.spares, spares(then, images), spares(now, images), changed)
    if not members.counts(now).keys() <= pods.keys():
        return None
    base = json.loads(revision.document)
    written = carried(base, document(then), document(now))
    spec = prune_unknown(written["spec"], base["spec"], spec_schema())[0]
    written = {**written, "spec": spec}
    requests_hash = revision.requests_hash
    if not members.counts(then).keys() <= revision.pods.keys() or (
        members.requests_hash(then, revision.pods) != members.requests_hash(now, pods)
    ):
        requests_hash = members.requests_hash(now, pods)
    text = _with_metadata(text_of(written), now)
    return Revision(images, stored, text, pods, others, now.spec.training.ranks, hashes, requests_hash)


def _carried(
    pinned_pods: Mapping[Group, Json], then: Mapping[Group, Json], now: Mapping[Group, Json], changed: Collection[Group]
) -> dict[Group, Json]:
    """Return one pod of each group with its user's edits; `changed`: groups whose template was edited."""
    pods = {group: pod for group, pod in pinned_pods.items() if group not in changed} | dict(now)
    for group in pods.keys() & now.keys() & pinned_pods.keys():
        if group in then:
            pods[group] = carried(pinned_pods[group], then[group], now[group])
        elif group not in changed:
            pods[group] = pinned_pods[group]
    return pods


def _goes_on(parsed: ParsedJob) -> str:
    return f"the job continues with the manifest of its start; a new start would be refused: {parsed.problem}"


def _pinned_job(job: RLHFJob, revision: Revision, home: str) -> PinnedJob:
    data = revision.data
    objects = plain(job, data, home)
    prints = {(kind_of(body), str(body["metadata"]["name"])): fingerprint(body) for body in objects}
    images = {"coordinatorImage": revision.images.coordinator, "workerImage": revision.images.worker}
    if revision.images.vllm_worker:
        images["vllmWorkerImage"] = revision.images.vllm_worker
    return PinnedJob(
        job,
        stored_revision=StoredRevision.from_data(data),
        status={**images, "digest": digest(data)},
        hashes=revision.hashes,
        fingerprints=prints,
        note=_waiting(job, json.loads(revision.document)),
    )


def _waiting(job: RLHFJob, base: Json) -> str:
    """Return a note on the user's fields that wait for the next start; empty if there are none."""
    now = document(job)
    _, unknown = prune_unknown(now["spec"], base.get("spec"), spec_schema(), "spec")
    said = [path for path in unknown if _value(now, path) != _default(path)]
    if not said:
        return ""
    listed = ", ".join(said)
    return f"{listed}: unknown to the version that runs the job; takes effect after suspend and resume"


def _value(data: Json, path: str) -> Any:
    value: Any = data
    for name in path.split("."):
        value = value[name]
    return without_nulls(value)


def _default(path: str) -> Any:
    schema = schema_at(path) or {}
    return with_defaults(schema.get("default"), schema)


def _with_metadata(text: str, job: RLHFJob) -> str:
    """Return job.json with the job's current metadata."""
    written, meta = json.loads(text), document(job)["metadata"]
    return text if written.get("metadata") == meta else text_of({**written, "metadata": meta})


def read(stored: Mapping[str, Any]) -> RLHFJob | None:
    """Return the resolved job of a stored object without checking rules across fields; None if it cannot be read."""
    try:
        return manifest.resolve(protocol.read_job(without_nulls(dict(stored))), _PODS_ROOT)
    except ValidationError:
        return None


def _text(stored: Mapping[str, Any]) -> str:
    meta = {key: value for key, value in stored["metadata"].items() if key in _STORED}
    return json.dumps(
        {"apiVersion": stored["apiVersion"], "kind": stored["kind"], "metadata": meta, "spec": stored.get("spec")}
    )
