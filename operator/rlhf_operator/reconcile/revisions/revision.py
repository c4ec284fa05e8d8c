"""What a job runs by, from its start to its end: its revision, as data, and as the job's ConfigMap and status keep it.

A revision holds what another version of the operator would make otherwise: the images, the resolved job as processes
read it, one pod of each group as it is made (number and restart left open), the fingerprints by which pods are outdated
and by which a queue admitted the job; and the job as its user had it then, to tell the user's edits apart from
defaults that are new. Who decides when there is another one is `pinning`.

Rule: pure. Pods are made from a revision, and whoever may write ConfigMaps must not get pods made by that: it counts
only with the digest that the job's status holds, which the operator alone writes.
"""

import base64
import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from rlhf_api.job import RLHFJob
from rlhf_api.structural_schema import job_schema
from rlhf_common.names import Group
from rlhf_operator.manifests import Images, TemplateError
from rlhf_operator.manifests.identity import EPOCH, INDEX, SPARE
from rlhf_operator.manifests.mount_paths import JOB_KEY, REVISION_KEY
from rlhf_operator.manifests.pods import USER_ID
from rlhf_operator.manifests.rendering import group_sizes, pod
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision

Json = dict[str, Any]

PLAIN_MAX: Final = 200_000
"""Characters of a revision that are written as they are; a larger one is compressed, as a ConfigMap takes 1 MiB."""


class RevisionFile(BaseModel):
    """The ConfigMap's revision.json, without what job.json holds."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    coordinator_image: str
    worker_image: str
    vllm_worker_image: str = ""
    run_as_user: int | None = USER_ID
    job: Json
    """The RLHFJob as it was stored when this was written, without its status."""
    pods: dict[str, Json]
    """Group -> one of its pods."""
    spares: dict[str, Json]
    """The same of workers beyond those that hold the training ranks."""
    ranks: int
    template_hashes: dict[str, str]
    claims: str


@dataclass(frozen=True)
class Revision:
    """What a job runs by."""

    images: Images
    job: Json
    document: str
    """job.json."""
    pods: Mapping[Group, Json]
    """One pod of each group, with INDEX and EPOCH for its number and restart."""
    spares: Mapping[Group, Json]
    """One that holds no training rank, with SPARE for its number, of a group whose first `ranks` do."""
    ranks: int
    hashes: Mapping[Group, str]
    """Template hash of each group."""
    requests_hash: str
    """Fingerprint of what a queue was asked for."""

    @property
    def data(self) -> dict[str, str]:
        """Return the data of the job's ConfigMap."""
        content = RevisionFile(
            coordinator_image=self.images.coordinator,
            worker_image=self.images.worker,
            vllm_worker_image=self.images.vllm_worker,
            run_as_user=self.images.user,
            job=self.job,
            pods={group.value: pod for group, pod in self.pods.items()},
            spares={group.value: pod for group, pod in self.spares.items()},
            ranks=self.ranks,
            template_hashes={group.value: value for group, value in self.hashes.items()},
            claims=self.requests_hash,
        )
        return {JOB_KEY: self.document, REVISION_KEY: _written(json.dumps(content.model_dump(exclude_defaults=True)))}

    def pod(self, group: Group, index: int, epoch: int) -> Json:
        """Return the pod of that group and index, after `epoch` restarts of its group."""
        spare = group in self.spares and index >= self.ranks
        text = json.dumps(self.spares[group] if spare else self.pods[group])
        made: Json = json.loads(text.replace(SPARE if spare else INDEX, str(index)).replace(EPOCH, str(epoch)))
        return made


def _written(text: str) -> str:
    if len(text) <= PLAIN_MAX:
        return text
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _read(written: str) -> str:
    return written if written.startswith("{") else zlib.decompress(base64.b64decode(written)).decode()


def digest(data: Mapping[str, str]) -> str:
    """Return the digest by which the status vouches for what the ConfigMap holds."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digests(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the digests that a job's status vouches for: of the present revision, and until that is written of the one
    before.
    """
    revision = status.get("revision") or {}
    return tuple(str(revision[name]) for name in ("digest", "previousDigest") if revision.get(name))


def trusted(kept: StoredRevision, vouched: tuple[str, ...]) -> Revision | None:
    """Return the revision of a ConfigMap; None when it has none, or none of these digests."""
    data = kept.data
    if REVISION_KEY not in data or digest(data) not in vouched:
        return None
    try:
        content = RevisionFile.model_validate_json(_read(data[REVISION_KEY]))
        pods, spares = ({Group(name): pod for name, pod in listed.items()} for listed in (content.pods, content.spares))
        hashes = {Group(name): value for name, value in content.template_hashes.items()}
    except (ValueError, zlib.error):
        return None
    images = Images(content.coordinator_image, content.worker_image, content.run_as_user, content.vllm_worker_image)
    return Revision(images, content.job, data[JOB_KEY], pods, spares, content.ranks, hashes, content.claims)


def shapes(job: RLHFJob, images: Images) -> dict[Group, Json]:
    """Return one pod of each group as this version makes it; a template of a group that has no pods may be wrong."""
    return _made(job, group_sizes(job), images, INDEX)


def spares(job: RLHFJob, images: Images) -> dict[Group, Json]:
    """Return one pod that holds no training rank, of a group where others hold them."""
    return {} if job.spec.rank_group is Group.TRAINING else _made(job, [job.spec.rank_group], images, SPARE)


def _made(job: RLHFJob, groups: Iterable[Group], images: Images, index: str) -> dict[Group, Json]:
    made = {}
    for group in groups:
        with contextlib.suppress(TemplateError):
            made[group] = pod(job, group, 0 if group is Group.COORDINATOR else index, images, EPOCH)
    return made


def spec_schema() -> Mapping[str, Any]:
    """Return the schema of a manifest's spec."""
    schema: Mapping[str, Any] = job_schema()["properties"]["spec"]
    return schema
