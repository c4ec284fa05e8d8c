"""The certificates of jobs as the cluster holds them: read, judged, issued and renewed.

Two Secrets a job: one that its pods mount, one with the authority's key that none does. Owns a memory of what was
read: good while all pods are up and the coordinator answers, as pods keep what they have mounted. Rule: an existing
authority is never replaced, as processes that run trust it alone; creating and not overwriting decides when two
operators issue at once. Dying between the two writes leaves an authority without a certificate, which the next visit
issues. A Secret that the job does not control is neither read nor written.
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
"""How long a Secret is taken to be as it was read, while somebody needs it or it may be another one."""
KEY: Final = "ca.key"


@dataclass(frozen=True)
class StoredCertificates:
    """Certificates of one job, as read or issued."""

    uid: str
    certificates: Certificates
    due: datetime
    """When they are to be renewed."""
    read: datetime


class JobCertificates:
    """Certificates by job key."""

    def __init__(self, client: KubernetesClient, lifetime: timedelta = LIFETIME) -> None:
        """`lifetime` of the certificates that are issued from now on."""
        self._client, self._lifetime = client, lifetime
        self._certificates: dict[str, StoredCertificates] = {}
        self._doubted: set[str] = set()
        """Jobs whose Secret is needed, and was read too lately to be read again."""

    def forget(self, key: str) -> None:
        """Drop what is remembered of a job that is gone."""
        self._certificates.pop(key, None)
        self._doubted.discard(key)

    async def current(self, key: str, uid: str, now: datetime, *, needed: bool) -> StoredCertificates | None:
        """Return what the job's Secret holds; None when there is none that can be used.

        `needed`: a pod starts and hangs when the Secret is gone, or the coordinator does not answer by what was read.
        """
        if needed:
            self._doubted.add(key)
        held = self._certificates.get(key)
        if held is not None and held.uid == uid and (key not in self._doubted or now - held.read < REREAD_INTERVAL):
            return held
        self._doubted.discard(key)
        namespace, _, name = key.partition("/")
        body = await self._client.get("Secret", namespace, f"{name}-certificates")
        result = _usable(body, uid)
        if result is None:
            self._certificates.pop(key, None)
            return None
        self._certificates[key] = held = StoredCertificates(uid, result, due(result), now)
        return held

    def seconds_to_reread(self, key: str, now: datetime) -> float | None:
        """Return the seconds until a Secret that is needed is read again; None: none is."""
        held = self._certificates.get(key)
        if held is None or key not in self._doubted:
            return None
        return max(0.0, (held.read + REREAD_INTERVAL - now).total_seconds())

    async def issue(self, key: str, job: RLHFJob, now: datetime) -> None:
        """Write a new certificate of the job's authority into its Secret."""
        authority = await self._authority(job, now)
        issued = authority.issue([], now, self._lifetime)
        await write(self._client, secret(job, issued.data()), known=key in self._certificates)
        self._certificates[key] = StoredCertificates(str(job.metadata["uid"]), issued, due(issued), now)

    async def _authority(self, job: RLHFJob, now: datetime) -> Authority:
        namespace, name = identity.namespace(job), identity.authority_name(job)
        made = new_authority(job.name, now)
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": identity.metadata(job, name, identity.labels(job)),
            "data": {
                "ca.crt": base64.b64encode(made.certificate).decode(),
                KEY: base64.b64encode(made.key).decode(),
            },
        }
        # Most jobs have none yet, so creating comes first.
        for _ in range(2):
            with contextlib.suppress(ConflictError):
                await self._client.create(manifest)
                return made
            body = await self._client.get("Secret", namespace, name)
            if body is not None:
                ensure_ours(manifest, body["metadata"])
                return _read(body, manifest)
        raise MissingError(f"secret {namespace}/{name} comes and goes")


def _usable(body: Mapping[str, Any] | None, uid: str) -> Certificates | None:
    if body is None or body["metadata"].get("deletionTimestamp"):
        return None
    if owner_of(body["metadata"]) != uid:
        return None
    try:
        data = _decoded(body)
        certificates = Certificates(data["ca.crt"], data["tls.crt"], data["tls.key"])
        certificates.expires  # noqa: B018 raises when it is no certificate
    except (KeyError, ValueError):
        return None
    return certificates


def _read(body: Mapping[str, Any], made: Mapping[str, Any]) -> Authority:
    """Return the authority of a stored Secret. Raises RefusedError when somebody has broken it."""
    try:
        data = _decoded(body)
        return Authority(data["ca.crt"], data[KEY])
    except (KeyError, ValueError) as error:
        name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
        remedy = (
            f"suspend the job, delete it (kubectl delete secret/{name} --namespace={namespace}), and resume the job"
        )
        raise RefusedError(f"Secret {name} holds no authority any more ({error}): {remedy}") from error


def _decoded(body: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(value) for name, value in (body.get("data") or {}).items()}
    except binascii.Error as error:
        raise ValueError(str(error)) from error
