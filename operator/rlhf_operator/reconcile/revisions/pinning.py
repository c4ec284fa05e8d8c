"""When a job gets another revision (`revision`): at a start, and by its user's edits; never by the operator's version.

- A job that has no pod and no status.startTime is not started: it has never been, or was suspended or evicted to the
  end. It runs by whatever this operator makes of it, with this operator's images.
- From then on its revision is kept. An edit is what differs between the job as it was stored with the revision and as
  it is stored now, both read by this version: so a default that is new is none. What the edit changes in what this
  version makes is changed in what the revision holds; the rest stays as it is. A field that the revision's version did
  not know waits for the next start.
- A job that runs and whose revision is lost gets one that this version makes, with the images that its status names.

Rule: pure. A rule that a newer version adds does not stop a job that runs: an edit is refused for what it breaks
itself. When the operator dies after the status of a start was written and before its ConfigMap, a job may start by the
revision of its last start.
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
from rlhf_operator.reconcile.revisions.three_way_merge import carried, known
from rlhf_operator.stored_job import UNREADABLE

Json = dict[str, Any]

_STORED: Final = ("name", "namespace", "uid", "labels")
"""Metadata of a job that its objects are made from."""
_PODS_ROOT: Final = Path("/")


@dataclass(frozen=True)
class PinnedJob(ParsedJob):
    """A parsed job, with the revision that it runs by."""

    stored_revision: StoredRevision = field(default_factory=StoredRevision)
    """The revision that the job is to have; empty: no pod is made."""
    status: Mapping[str, str] = field(default_factory=dict)
    """`status.revision`."""
    hashes: Mapping[Group, str] = field(default_factory=dict)
    """By which pods are outdated."""
    fingerprints: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(kind, name) -> fingerprint of what pods need, without the Secret; the objects themselves would fill memory."""
    note: str = ""
    """What the user should know of the revision."""
    settled: bool = False
    """The job has it already: nothing about it is to be judged again."""

    @property
    def revision(self) -> Revision | None:
        """Return the revision unpacked, for when pods or objects are made from it; None when there is none."""
        return trusted(self.stored_revision, (self.status.get("digest", ""),))


def pin_revision(parsed: ParsedJob, stored: Mapping[str, Any], observed: ObservedJob) -> PinnedJob:
    """Return a stored job with the revision that it is to have."""
    if parsed.job is None and (stored.get(UNREADABLE) or too_deep(dict(stored))):
        return _without(parsed)
    status, images = stored.get("status") or {}, observed.images
    if observed.pods or status.get("startTime"):
        held = _held(_text(stored), observed.stored_revision, digests(status), observed.home)
        if held is not None:
            return held
        images = _started_by(status, images)
    if not parsed.planned:
        return _without(parsed)
    return _started(_text(stored), images, observed.home)


def _started_by(status: Mapping[str, Any], images: Images) -> Images:
    """Return the images that the status of a job names, else `images`. The user is the one of now."""
    named = status.get("revision")
    if not named:
        return images
    return Images(named["coordinatorImage"], named["workerImage"], images.user, named.get("vllmWorkerImage", ""))


def _without(parsed: ParsedJob) -> PinnedJob:
    return PinnedJob(parsed.job, parsed.problem, parsed.reason)


@cached(REMEMBERED)
def _started(text: str, images: Images, home: str) -> PinnedJob:
    """Return the job with the revision that this version makes."""
    stored = json.loads(text)
    job = parse_job(stored).job
    assert job is not None
    pods, hashes = shapes(job, images), {group: template_hash(job, group) for group in group_sizes(job)}
    ranks = job.spec.training.ranks
    requests_hash = members.requests_hash(job, pods)
    written = text_of(document(job))
    return _of(job, Revision(images, stored, written, pods, spares(job, images), ranks, hashes, requests_hash), home)


@cached(REMEMBERED)
def _held(text: str, kept: StoredRevision, vouched: tuple[str, ...], home: str) -> PinnedJob | None:
    """Return the job with the revision that it has and its user's edits; None when it has none."""
    revision = trusted(kept, vouched)
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
        return replace(_of(now, revision, home), job=parsed.job, problem=parsed.problem, reason=parsed.reason)
    held = _of(now, changed, home)
    if parsed.problem:
        held = replace(held, note="; ".join(filter(None, [_goes_on(parsed), held.note])))
    before = digest(kept.data)
    if before == held.status["digest"]:
        return replace(held, settled=True)
    return replace(held, status={**held.status, "previousDigest": before})


def _problem(stored: Json) -> str:
    """Return what is wrong with a job. What is wrong before an edit and after it is not for the edit to put right.

    With a definition that is newer than this operator, fields that it does not know are in every stored object.
    """
    return parse_job({**stored, "spec": pruned(stored["spec"], spec_schema())}).problem


def _edited(then: RLHFJob, now: RLHFJob, stored: Json, revision: Revision) -> Revision | None:
    """Return `revision` with what its user changed; None when a group is to have pods that cannot be made."""
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
    spec = known(written["spec"], base["spec"], spec_schema())[0]
    written = {**written, "spec": spec}
    requests_hash = revision.requests_hash
    if not members.counts(then).keys() <= revision.pods.keys() or (
        members.requests_hash(then, revision.pods) != members.requests_hash(now, pods)
    ):
        requests_hash = members.requests_hash(now, pods)
    text = _with_metadata(text_of(written), now)
    return Revision(images, stored, text, pods, others, now.spec.training.ranks, hashes, requests_hash)


def _carried(
    held: Mapping[Group, Json], then: Mapping[Group, Json], now: Mapping[Group, Json], changed: Collection[Group]
) -> dict[Group, Json]:
    """Return one pod of each group with its user's edits; `changed`: groups whose template is another one now."""
    pods = {group: pod for group, pod in held.items() if group not in changed} | dict(now)
    for group in pods.keys() & now.keys() & held.keys():
        if group in then:
            pods[group] = carried(held[group], then[group], now[group])
        elif group not in changed:
            pods[group] = held[group]
    return pods


def _goes_on(parsed: ParsedJob) -> str:
    return f"the job goes on as it was started, though a new start would be refused: {parsed.problem}"


def _of(job: RLHFJob, revision: Revision, home: str) -> PinnedJob:
    data = revision.data
    made = plain(job, data, home)
    prints = {(kind_of(body), str(body["metadata"]["name"])): fingerprint(body) for body in made}
    images = {"coordinatorImage": revision.images.coordinator, "workerImage": revision.images.worker}
    if revision.images.vllm_worker:
        images["vllmWorkerImage"] = revision.images.vllm_worker
    return PinnedJob(
        job,
        stored_revision=StoredRevision.of(data),
        status={**images, "digest": digest(data)},
        hashes=revision.hashes,
        fingerprints=prints,
        note=_waiting(job, json.loads(revision.document)),
    )


def _waiting(job: RLHFJob, base: Json) -> str:
    """Return a note on the fields that the user set and that wait for the next start; empty when none does."""
    now = document(job)
    _, unknown = known(now["spec"], base.get("spec"), spec_schema(), "spec")
    said = [path for path in unknown if _value(now, path) != _default(path)]
    if not said:
        return ""
    listed = ", ".join(said)
    return f"{listed}: not known to the version that the job runs by; takes effect when it is suspended and resumed"


def _value(data: Json, path: str) -> Any:
    value: Any = data
    for name in path.split("."):
        value = value[name]
    return without_nulls(value)


def _default(path: str) -> Any:
    schema = schema_at(path) or {}
    return with_defaults(schema.get("default"), schema)


def _with_metadata(text: str, job: RLHFJob) -> str:
    """Return a job.json with the job's labels as they are now."""
    written, meta = json.loads(text), document(job)["metadata"]
    return text if written.get("metadata") == meta else text_of({**written, "metadata": meta})


def read(stored: Mapping[str, Any]) -> RLHFJob | None:
    """Return the job of a stored object, whatever else this version asks of it; None when it cannot be read."""
    try:
        return manifest.resolve(protocol.read_job(without_nulls(dict(stored))), _PODS_ROOT)
    except ValidationError:
        return None


def _text(stored: Mapping[str, Any]) -> str:
    meta = {key: value for key, value in stored["metadata"].items() if key in _STORED}
    return json.dumps(
        {"apiVersion": stored["apiVersion"], "kind": stored["kind"], "metadata": meta, "spec": stored.get("spec")}
    )
