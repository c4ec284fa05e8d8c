"""The revision of a job, as data, and its form in the job's ConfigMap and status. Rule: pure.

A revision contains what must not change with the version of the operator: images, the resolved job, one pod of each
group and the user's job at its writing. It is valid only with a digest in the job's status, so that a writer of
ConfigMaps cannot create pods.
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
"""Most characters of a revision that is stored uncompressed."""


class RevisionFile(BaseModel):
    """Content of the ConfigMap's revision.json, without that of job.json."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    coordinator_image: str
    worker_image: str
    vllm_worker_image: str = ""
    run_as_user: int | None = USER_ID
    job: Json
    """The RLHFJob as stored when the revision was written, without its status."""
    pods: dict[str, Json]
    """Group -> one of its pods."""
    spares: dict[str, Json]
    """Group -> one of its pods beyond those with training ranks."""
    ranks: int
    template_hashes: dict[str, str]
    claims: str


@dataclass(frozen=True)
class Revision:
    """The revision of a job."""

    images: Images
    job: Json
    document: str
    """Content of job.json."""
    pods: Mapping[Group, Json]
    """One pod of each group, with INDEX (except the coordinator's) and EPOCH for its index and restarts."""
    spares: Mapping[Group, Json]
    """One pod without a training rank, with SPARE for its index, for a group whose first `ranks` pods have them."""
    ranks: int
    hashes: Mapping[Group, str]
    """Template hash of each group."""
    requests_hash: str
    """`members.requests_hash` of the pods."""

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
        """Return the pod of that group and index after `epoch` restarts of its group."""
        spare = group in self.spares and index >= self.ranks
        text = json.dumps(self.spares[group] if spare else self.pods[group])
        body: Json = json.loads(text.replace(SPARE if spare else INDEX, str(index)).replace(EPOCH, str(epoch)))
        return body


def _written(text: str) -> str:
    if len(text) <= PLAIN_MAX:
        return text
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _read(written: str) -> str:
    return written if written.startswith("{") else zlib.decompress(base64.b64decode(written)).decode()


def digest(data: Mapping[str, str]) -> str:
    """Return the digest of the data of a ConfigMap."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digests(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the digests in a job's status: of the current revision, and of the previous one if that is named."""
    revision = status.get("revision") or {}
    return tuple(str(revision[name]) for name in ("digest", "previousDigest") if revision.get(name))


def trusted(stored_revision: StoredRevision, vouched: tuple[str, ...]) -> Revision | None:
    """Return the revision in a ConfigMap; None if there is none, it cannot be read, or `vouched` lacks its digest."""
    data = stored_revision.data
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
    """Return one pod of each group, rendered by this version, without groups whose template is invalid."""
    return _rendered_pods(job, group_sizes(job), images, INDEX)


def spares(job: RLHFJob, images: Images) -> dict[Group, Json]:
    """Return one pod without a training rank, for a group in which others have them; empty without such a group."""
    return {} if job.spec.rank_group is Group.TRAINING else _rendered_pods(job, [job.spec.rank_group], images, SPARE)


def _rendered_pods(job: RLHFJob, groups: Iterable[Group], images: Images, index: str) -> dict[Group, Json]:
    pods = {}
    for group in groups:
        with contextlib.suppress(TemplateError):
            pods[group] = pod(job, group, 0 if group is Group.COORDINATOR else index, images, EPOCH)
    return pods


def spec_schema() -> Mapping[str, Any]:
    """Return the schema of a manifest's spec."""
    schema: Mapping[str, Any] = job_schema()["properties"]["spec"]
    return schema
