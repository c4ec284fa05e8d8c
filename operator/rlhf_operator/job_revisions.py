"""Reads and caches the stored revisions of jobs.

A revision is cached if the job's status has its digest. It is also returned when the ConfigMap is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.manifests import identity
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision
from rlhf_operator.reconcile.revisions.revision import digest, digests

NOTHING: Final = StoredRevision()


@dataclass(frozen=True)
class _Read:
    uid: str
    fingerprint: str
    """Fingerprint of the ConfigMap that was read."""
    revision: StoredRevision


class JobRevisions:
    """Revisions by job key."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._read: dict[str, _Read] = {}

    def forget(self, key: str) -> None:
        """Forget the revision of a job that is deleted or does not need it for now."""
        self._read.pop(key, None)

    async def current(
        self,
        key: str,
        uid: str,
        applied: Mapping[tuple[str, str], str],
        status: Mapping[str, object],
        pods: Mapping[str, ObservedPod],
    ) -> StoredRevision:
        """Return the revision in the job's ConfigMap, perhaps cached; `applied`: fingerprints of the existing objects.

        Raises ApiError.
        """
        namespace, _, job = key.partition("/")
        name = identity.configuration_of(job)
        cached, fingerprint = self._read.get(key), applied.get(("ConfigMap", name))
        if cached is not None and cached.uid == uid and fingerprint in (None, cached.fingerprint):
            return cached.revision
        if fingerprint is None and not pods:
            return NOTHING
        body = await self._client.get("ConfigMap", namespace, name)
        data = (body or {}).get("data") or {}
        revision = StoredRevision.from_data({str(key): str(text) for key, text in data.items()})
        if digest(revision.data) in digests(status):
            self._read[key] = _Read(uid, fingerprint or "", revision)
            return revision
        # The status does not have its digest, so it is read each time.
        self._read.pop(key, None)
        return revision
