"""Reads, issues and renews the certificates of jobs in the cluster.

Must never overwrite an authority, nor use a Secret that the job does not control.
"""

import base64
import binascii
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ConflictError, MissingError, RefusedError
from rlhf_operator.certificates import LIFETIME, Authority, Certificates, due, new_authority
from rlhf_operator.job_objects import ensure_ours, write
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.configuration import secret
from rlhf_operator.untrusted import owner_of

REREAD_INTERVAL: Final = timedelta(seconds=10)
"""Time for which a read Secret is not read again although it is needed."""
KEY: Final = "ca.key"


@dataclass(frozen=True)
class StoredCertificates:
    """Certificates of one job, as read or issued."""

    uid: str
    certificates: Certificates
    due: datetime
    """Time of their renewal."""
    read: datetime


class JobCertificates:
    """Certificates by job key."""

    def __init__(self, client: KubernetesClient, lifetime: timedelta = LIFETIME) -> None:
        """`lifetime` of the certificates that are issued from now on."""
        self._client, self._lifetime = client, lifetime
        self._certificates: dict[str, StoredCertificates] = {}
        self._doubted: set[str] = set()
        """Jobs whose Secret was needed too soon after it was read."""

    def forget(self, key: str) -> None:
        """Drop the cached certificates of a deleted job."""
        self._certificates.pop(key, None)
        self._doubted.discard(key)

    async def current(self, key: str, uid: str, now: datetime, *, needed: bool) -> StoredCertificates | None:
        """Return the certificates in the job's Secret, perhaps cached; None if there are no usable ones.

        `needed`: a starting pod would hang without the Secret, or the coordinator does not answer.
        """
        if needed:
            self._doubted.add(key)
        stored = self._certificates.get(key)
        if (
            stored is not None
            and stored.uid == uid
            and (key not in self._doubted or now - stored.read < REREAD_INTERVAL)
        ):
            return stored
        self._doubted.discard(key)
        namespace, _, name = key.partition("/")
        body = await self._client.get("Secret", namespace, f"{name}-certificates")
        result = _usable(body, uid)
        if result is None:
            self._certificates.pop(key, None)
            return None
        self._certificates[key] = stored = StoredCertificates(uid, result, due(result), now)
        return stored

    def seconds_to_reread(self, key: str, now: datetime) -> float | None:
        """Return the seconds until a needed Secret may be read again; None if none is needed or cached."""
        stored = self._certificates.get(key)
        if stored is None or key not in self._doubted:
            return None
        return max(0.0, (stored.read + REREAD_INTERVAL - now).total_seconds())

    async def issue(self, key: str, job: RLHFJob, now: datetime) -> None:
        """Write a new certificate of the job's authority into its Secret; create the authority if it is missing."""
        authority = await self._authority(job, now)
        issued = authority.issue([], now, self._lifetime)
        await write(self._client, secret(job, issued.data()), exists=key in self._certificates)
        self._certificates[key] = StoredCertificates(str(job.metadata["uid"]), issued, due(issued), now)

    async def _authority(self, job: RLHFJob, now: datetime) -> Authority:
        namespace, name = identity.namespace(job), identity.authority_name(job)
        authority = new_authority(job.name, now)
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": identity.metadata(job, name, identity.labels(job)),
            "data": {
                "ca.crt": base64.b64encode(authority.certificate).decode(),
                KEY: base64.b64encode(authority.key).decode(),
            },
        }
        # The first attempt is to create it; an existing one is read.
        for _ in range(2):
            with contextlib.suppress(ConflictError):
                await self._client.create(manifest)
                return authority
            body = await self._client.get("Secret", namespace, name)
            if body is not None:
                ensure_ours(manifest, body["metadata"])
                return _read(body, manifest, now)
        raise MissingError(f"secret {namespace}/{name} appears and disappears repeatedly")


def _usable(body: Mapping[str, Any] | None, uid: str) -> Certificates | None:
    if body is None or body["metadata"].get("deletionTimestamp"):
        return None
    if owner_of(body["metadata"]) != uid:
        return None
    try:
        data = _decoded(body)
        certificates = Certificates(data["ca.crt"], data["tls.crt"], data["tls.key"])
        certificates.check()
    except (KeyError, ValueError):
        return None
    return certificates


def _read(body: Mapping[str, Any], manifest: Mapping[str, Any], now: datetime) -> Authority:
    """Return the authority of a stored Secret. Raises RefusedError if it cannot issue certificates."""
    try:
        data = _decoded(body)
        authority = Authority(data["ca.crt"], data[KEY])
        authority.check(now)
        return authority
    except (KeyError, ValueError) as error:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        remedy = (
            f"suspend the job, delete it (kubectl delete secret/{name} --namespace={namespace}), and resume the job"
        )
        raise RefusedError(f"Secret {name} holds no usable authority any more ({error}): {remedy}") from error


def _decoded(body: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(value) for name, value in (body.get("data") or {}).items()}
    except binascii.Error as error:
        raise ValueError(str(error)) from error
