"""Creates, changes, labels and deletes the objects of jobs.

An object of somebody else (by its controller's uid) with a name that the job needs is reported and left unchanged. Pods
are created last: before, they could run with foreign content or without a NetworkPolicy.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError, ConflictError, MissingError, RefusedError
from rlhf_operator.api_client.transport import CONCURRENCY
from rlhf_operator.gang.apis import RESOURCES, kind_of
from rlhf_operator.index import Index
from rlhf_operator.reconcile import PodDeletion, PoolLabel
from rlhf_operator.reconcile.last_applied import FINGERPRINT
from rlhf_operator.reconcile.phases import REFUSED_RETRY_SECONDS
from rlhf_operator.untrusted import describe_finalizers, finalizers_of, owner_of
from rlhf_operator.user_code_config_maps import creatable_pods

log = logging.getLogger(__name__)

Json = dict[str, Any]
Issue = Callable[[], Awaitable[object]]

AT_ONCE: Final = CONCURRENCY // 2
"""Requests of one job at once, so that a job with thousands of pods leaves slots for others."""
SETTLE_SECONDS: Final = 0.2
"""Maximum seconds until the reconcile after a write."""
DELETE_AGAIN_SECONDS: Final = 60.0
"""Seconds until the deletion of a remaining pod is requested again."""
LEAVING_SECONDS: Final = 2.0
"""Seconds until an object with a LeavingError is checked again."""
LONGEST_PAUSE_SECONDS: Final = 300.0
"""Longest pause in seconds between attempts at a write that is refused again; the first is REFUSED_RETRY_SECONDS."""
clock: Callable[[], float] = time.monotonic


class OccupiedError(RefusedError):
    """An object of somebody else has a name that the job needs."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        kind, name = str(manifest["kind"]), str(manifest["metadata"]["name"])
        super().__init__(f"{kind} {name} is not of this job")
        self.object_shown = f"{kind} {name}"
        gang = RESOURCES.get(kind_of(manifest))
        self.resource = f"{gang.plural}.{gang.group}/{name}" if gang else f"{kind.lower()}/{name}"


class LeavingError(RefusedError):
    """The object is being deleted, or belongs to an earlier job of this name; no finalizer delays its deletion."""


class KeptError(RefusedError):
    """The object is being deleted, and finalizers of others delay that."""


@dataclass
class WriteResult:
    """The result of the writes of one reconcile."""

    refused: dict[str, str] = field(default_factory=dict)
    """Object name -> why it was not written."""
    terminating: dict[str, str] = field(default_factory=dict)
    """Object name -> why it is not written: finalizers delay its deletion, and it serves the job until it is gone."""
    occupied: dict[str, str] = field(default_factory=dict)
    """Objects of others: `Service job` -> its name for kubectl."""
    leaving: bool = False
    """Whether a write in `refused` raised LeavingError."""
    written: bool = False
    """Whether any write succeeded, or found its pod in place."""
    planned: frozenset[tuple[str, str]] = frozenset()
    """(name, fingerprint) of all objects in the plan."""
    attempts: int = 0
    """Consecutive attempts with refused writes; 0 after one with a LeavingError."""
    again: float = 0.0
    """Time of the next attempt at refused writes, by `clock`."""

    @property
    def unwritten(self) -> dict[str, str]:
        """Return object name -> reason for objects that were not written, without those in `occupied`."""
        return self.terminating | self.refused

    @property
    def held_up(self) -> bool:
        """Return whether a write was refused or a name is occupied; no further pod is then created."""
        return bool(self.refused or self.occupied)


async def write(client: KubernetesClient, manifest: Json, *, exists: bool = False) -> Json:
    """Create an object of a job, or change it if the job controls it and it is no pod; return at least its metadata.

    `exists`: do not try to create it first. Raises ApiError, such as OccupiedError, LeavingError or KeptError.
    """
    kind, meta = kind_of(manifest), manifest["metadata"]
    there = await client.get(kind, meta["namespace"], meta["name"]) if exists else None
    if there is None:
        try:
            return await client.create(manifest)
        except ConflictError:
            there = await client.get(kind, meta["namespace"], meta["name"])
    if there is None:
        raise ConflictError(f"{kind} {meta['name']} appears and disappears repeatedly")
    ensure_ours(manifest, there["metadata"])
    if kind == "Pod":
        return there
    ensure_stays(manifest, there["metadata"])
    await client.manage_created(kind, there["metadata"])
    return await client.apply({**manifest, "metadata": {**meta, "uid": there["metadata"]["uid"]}})


def ensure_ours(manifest: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise a RefusedError, such as OccupiedError, if the object with metadata `there` is not of the job of
    `manifest`.
    """
    [ours] = manifest["metadata"]["ownerReferences"]
    if owner_of(there) == ours["uid"]:
        return
    if ours in [{**owner_reference, "uid": ours["uid"]} for owner_reference in there.get("ownerReferences") or []]:
        if finalizers := finalizers_of(there):
            reason = f"belongs to an earlier job of this name and cannot be removed: {describe_finalizers(finalizers)}"
            raise RefusedError(f"{_title(manifest)} {reason}")
        raise LeavingError(f"{_title(manifest)} belongs to an earlier job of this name and is deleted with it")
    raise OccupiedError(manifest)


def ensure_stays(manifest: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise LeavingError or KeptError if the object with metadata `there` is being deleted."""
    if not there.get("deletionTimestamp"):
        return
    if finalizers := finalizers_of(there):
        raise KeptError(f"{_title(manifest)} is deleted and cannot be removed: {describe_finalizers(finalizers)}")
    raise LeavingError(f"{_title(manifest)} is being deleted; the operator creates it again afterwards")


def _title(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


class JobObjects:
    """Writes the controller's objects and remembers the results."""

    def __init__(self, client: KubernetesClient, index: Index) -> None:
        self._client, self._index = client, index
        self._rounds: dict[str, WriteResult] = {}
        self._deletions: dict[str, dict[PodDeletion, float]] = {}
        """Job -> deletions that were sent -> time on a monotonic clock."""

    def last(self, key: str) -> WriteResult:
        """Return the result of the last `apply` if it left objects unwritten, else an empty one."""
        return self._rounds.get(key, WriteResult())

    def forget(self, key: str) -> None:
        """Drop the results of a deleted job."""
        self._rounds.pop(key, None)
        self._deletions.pop(key, None)

    async def apply(self, key: str, manifests: Sequence[Json], issue: Issue | None = None) -> float | None:
        """Write objects, pods last, and issue certificates; return the seconds until the next reconcile, or None.

        Raises ApiError for failures other than a RefusedError or MissingError of a write.
        """
        before, write_result = self.last(key), WriteResult(planned=frozenset(map(_identity, manifests)))
        waits = bool(before.refused) and clock() < before.again and before.planned == write_result.planned
        if waits:
            names_left = [manifest for manifest in manifests if manifest["metadata"]["name"] not in before.refused]
            manifests = [manifest for manifest in names_left if manifest["kind"] != "Pod"]
        others = [manifest for manifest in manifests if manifest["kind"] != "Pod"]
        pods = [manifest for manifest in manifests if manifest["kind"] == "Pod"]
        first = [partial(self._issue, key, issue, write_result)] if issue else []
        await all_of([*first, *(partial(self._write, key, other, write_result) for other in others)])
        pods, lacking = await creatable_pods(self._client, pods)
        writes = [partial(self._write, key, pod, write_result) for pod in pods]
        # A refusal of one pod probably applies to the next. After one, a single pod tests whether it still holds.
        alone = 1 if before.attempts else 0
        await all_of(writes[:alone], lambda: not write_result.held_up)
        await all_of(writes[alone:], lambda: not write_result.held_up)
        _plan_retry(write_result, before, waits=waits)
        write_result.refused |= before.refused if waits else lacking
        self._rounds.pop(key, None)
        if write_result.held_up or write_result.terminating:
            self._rounds[key] = write_result
        news = bool(before.unwritten) != bool(write_result.unwritten) or before.occupied != write_result.occupied
        if news or (issue and not write_result.unwritten and not write_result.occupied):
            return 0.0
        if write_result.written:
            return SETTLE_SECONDS
        return LEAVING_SECONDS if write_result.leaving else None

    async def _issue(self, key: str, issue: Issue, found: WriteResult) -> None:
        await self._attempt(key, "certificates", issue, found)

    async def _write(self, key: str, manifest: Json, found: WriteResult) -> None:
        async def written() -> None:
            kind, name = kind_of(manifest), str(manifest["metadata"]["name"])
            exists = self._index.other(key, owner_of(manifest["metadata"]), kind, name) is not None
            meta = await write(self._client, manifest, exists=exists)
            if kind == "Pod":
                self._index.put_pod(key, meta)
            else:
                self._index.put_other(key, kind, meta["metadata"])

        await self._attempt(key, str(manifest["metadata"]["name"]), written, found)

    async def _attempt(self, key: str, name: str, attempt: Issue, found: WriteResult) -> None:
        try:
            await attempt()
            found.written = True
        except OccupiedError as error:
            found.occupied[error.object_shown] = error.resource
            self._say_once(key, error.object_shown in self.last(key).occupied, error)
        except KeptError as error:
            found.terminating[name] = str(error)
            self._say_once(key, name in self.last(key).terminating, error)
        except (RefusedError, MissingError) as error:
            found.refused[name] = str(error)
            found.leaving = found.leaving or isinstance(error, LeavingError)
            self._say_once(key, name in self.last(key).refused, error)

    def _say_once(self, key: str, said: bool, error: ApiError) -> None:
        if not said:
            log.warning("%s: not written: %s", key, error, extra={"job": key})

    async def hold(self, key: str, job: Json, *, hold: bool) -> None:
        """Add or remove our finalizer of the job; finalizers of others stay."""
        meta = {item: job["metadata"][item] for item in ("name", "namespace", "uid")}
        if hold:
            meta["finalizers"] = [names.FINALIZER]
        await self._patch(key, {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta})

    async def label(self, key: str, labels: Sequence[PoolLabel]) -> None:
        """Set or remove the label of the migration pool on pods, by server-side apply."""
        namespace = key.partition("/")[0]
        manifests = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": label.name, "namespace": namespace, "uid": label.uid}
                | ({"labels": {names.LABEL_POOL: "true"}} if label.pooled else {}),
            }
            for label in labels
        ]
        await all_of([partial(self._patch, key, manifest) for manifest in manifests])

    async def _patch(self, key: str, manifest: Json) -> None:
        """Apply to an existing object; ignore one that is gone or was replaced, and log a refusal."""
        try:
            await self._client.apply(manifest)
        except (ConflictError, MissingError):
            return
        except RefusedError as error:
            name = f"{manifest['kind']} {manifest['metadata']['name']}"
            log.warning("%s: %s is not changed: %s", key, name, error, extra={"job": key})

    async def delete(self, key: str, pods: Sequence[PodDeletion]) -> float | None:
        """Delete pods unless they have been replaced; return the seconds until the next reconcile, or None without
        pods.

        A deletion that was requested less than DELETE_AGAIN_SECONDS ago is not repeated.
        """
        now = clock()
        recent = {item: at for item, at in self._deletions.get(key, {}).items() if now - at < DELETE_AGAIN_SECONDS}
        self._deletions[key] = recent
        delete = partial(self._client.delete, "Pod", key.partition("/")[0])

        async def send(item: PodDeletion) -> None:
            await delete(item.name, item.uid, force=item.force, grace=item.grace)
            recent[item] = now

        wanted = [item for item in pods if item not in recent]
        await all_of([partial(send, item) for item in wanted])
        if not recent:
            del self._deletions[key]
        return SETTLE_SECONDS if wanted else DELETE_AGAIN_SECONDS if pods else None


def _identity(manifest: Json) -> tuple[str, str]:
    meta = manifest["metadata"]
    return str(meta["name"]), str((meta.get("annotations") or {}).get(FINGERPRINT))


def _plan_retry(write_result: WriteResult, before: WriteResult, *, waits: bool) -> None:
    """Set the time of the next attempt at refused writes; `waits`: there was no attempt now."""
    if waits:
        write_result.attempts, write_result.again = before.attempts, before.again
        write_result.leaving = before.leaving
        return
    pause = LEAVING_SECONDS if write_result.leaving else REFUSED_RETRY_SECONDS
    if write_result.refused and not write_result.leaving:
        write_result.attempts = before.attempts + 1
        pause = min(LONGEST_PAUSE_SECONDS, pause * 2.0 ** min(before.attempts, 16))
    write_result.again = clock() + pause


async def all_of(
    requests: Sequence[Callable[[], Awaitable[object]]], wanted: Callable[[], bool] = lambda: True
) -> None:
    """Run requests, at most AT_ONCE at a time, while they are `wanted`.

    After an ApiError no further request starts, and requests in flight are awaited. Raises the first ApiError.
    """
    waiting, errors = iter(requests), list[ApiError]()

    async def serve() -> None:
        for item in waiting:
            if errors or not wanted():
                return
            try:
                await item()
            except ApiError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(AT_ONCE, len(requests))):
            tasks.create_task(serve())
    if errors:
        raise errors[0]
