"""Leader election by a Lease: one of several operators reconciles, the others wait.

An operator that cannot renew its lease gives it up RENEW_DEADLINE after it sent its last successful request, before the
lease expires. Expiry counts from the last change that this process saw, so clocks of machines are not compared.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError, ConflictError

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 15
RENEW_DEADLINE: Final = 10.0
ATTEMPT_SECONDS: Final = 5.0
"""Time-out in seconds of one attempt to renew."""
RETRY_SECONDS: Final = 2.0
"""Seconds between attempts."""


class LeaseLostError(Exception):
    """The lease could not be renewed in time, or another operator took it."""


class Leader:
    """One candidate."""

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        operator_class: str = "",
    ) -> None:
        """Each operator class has its own Lease, so operators of different classes do not compete."""
        self._client, self._namespace, self._identity, self._clock = client, namespace, identity, clock
        self._name = names.lease_name(operator_class)
        self._seen: tuple[str, float] = ("", float("-inf"))
        self._lease: dict[str, Any] | None = None
        self._renewed = float("-inf")
        """Time at which the last successful attempt began: the API server wrote the lease at that time or later."""
        self._taken = False
        """Whether another operator had the lease at the last attempt."""

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        while not await self._attempt():  # noqa: ASYNC110 what is waited for happens in another process
            await asyncio.sleep(RETRY_SECONDS)

    async def hold(self) -> None:
        """Renew until renewal fails for too long or another operator has the lease. Raises LeaseLostError."""
        while not self._taken and (left := self._seconds_left()) > 0:
            await asyncio.sleep(min(RETRY_SECONDS, left))
            if (left := self._seconds_left()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, ATTEMPT_SECONDS)):
                        await self._attempt()
        reason = "in time: another operator has it" if self._taken else f"for {RENEW_DEADLINE:.0f} s"
        raise LeaseLostError(f"the lease {self._namespace}/{self._name} was not renewed {reason}")

    def _seconds_left(self) -> float:
        return self._renewed + RENEW_DEADLINE - self._clock()

    async def release(self) -> None:
        """Release the lease if this process has it; log a failure."""
        if self._lease is None:
            return
        self._lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._client.replace(self._lease)
        except ApiError as error:
            log.warning("the lease could not be released: %s", error)
        self._lease = None

    async def _attempt(self) -> bool:
        began = self._clock()
        try:
            succeeded = await self._acquire_or_renew()
            if succeeded:
                self._renewed = began
            return succeeded
        except ConflictError:
            self._lease = None
        except ApiError as error:
            log.warning("the lease could not be read or written: %s", error)
        return False

    async def _acquire_or_renew(self) -> bool:
        lease = self._lease or await self._client.get("Lease", self._namespace, self._name)
        if lease is None:
            self._lease = await self._written({"namespace": self._namespace, "name": self._name}, 0, new=True)
            return True
        spec = lease.get("spec") or {}
        ours = spec.get("holderIdentity") == self._identity
        self._taken = not ours and not self._expired(lease, spec)
        if self._taken:
            self._lease = None
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (not ours)
        self._lease = await self._written(
            lease["metadata"], transitions, acquired=spec.get("acquireTime") if ours else None
        )
        return True

    def _expired(self, lease: dict[str, Any], spec: dict[str, Any]) -> bool:
        version = str(lease["metadata"]["resourceVersion"])
        if not spec.get("holderIdentity"):
            return True
        if self._seen[0] != version:
            self._seen = version, self._clock()
        return self._clock() - self._seen[1] > float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    async def _written(
        self, meta: dict[str, Any], transitions: int, *, acquired: str | None = None, new: bool = False
    ) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata = {key: meta[key] for key in ("name", "namespace", "resourceVersion", "uid") if key in meta}
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        answer = await (self._client.create(manifest) if new else self._client.replace(manifest))
        return manifest | {"metadata": metadata | {"resourceVersion": answer["metadata"]["resourceVersion"]}}
