"""What jobs run by, as the cluster holds it: read when it is news, and remembered.

A job's ConfigMap is read once, and again when the fingerprint that a watch delivers is another; so a job that nothing
happens to costs no request.
Owns a memory of what was read. Rule: judges nothing (`reconcile.revisions` does) but whether it was there: what this
process has read is still known when the ConfigMap is gone. Lost with the process.
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
    kept: StoredRevision


class JobRevisions:
    """Revisions by job key."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._read: dict[str, _Read] = {}

    def forget(self, key: str) -> None:
        """The job is gone, or needs none for now."""
        self._read.pop(key, None)

    async def current(
        self,
        key: str,
        uid: str,
        applied: Mapping[tuple[str, str], str],
        status: Mapping[str, object],
        pods: Mapping[str, ObservedPod],
    ) -> StoredRevision:
        """What is known of the revision of the job of that uid; `applied`: fingerprints of the objects that exist.
        Raises ApiError."""
        namespace, _, job = key.partition("/")
        name = identity.configuration_of(job)
        known, fingerprint = self._read.get(key), applied.get(("ConfigMap", name))
        if known is not None and known.uid == uid and fingerprint in (None, known.fingerprint):
            return known.kept
        if fingerprint is None and not pods:
            return NOTHING
        body = await self._client.get("ConfigMap", namespace, name)
        data = (body or {}).get("data") or {}
        kept = StoredRevision.of({str(key): str(text) for key, text in data.items()})
        if digest(kept.data) in digests(status):
            self._read[key] = _Read(uid, fingerprint or "", kept)
            return kept
        # Written for another job of its name, or by somebody else: looked at each time.
        self._read.pop(key, None)
        return kept
