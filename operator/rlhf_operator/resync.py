"""The slow backstop of the watches: lists all objects, compares them with the index, and corrects the index.

Rule: sends only reads. A version lower than one known before means that etcd was restored from a backup; the process
then ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError
from rlhf_operator.api_client.resources import ResourceTable
from rlhf_operator.index import Index, key_of, owner_key
from rlhf_operator.untrusted import UnreadableError, identity_of
from rlhf_operator.watch_events import WATCHED
from rlhf_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

RESYNC_SECONDS: Final = 300.0
"""Most seconds from the end of one comparison to the start of the next."""
FULL_EVERY: Final = 12
"""Comparisons after which every job is reconciled: about an hour, if no comparison is requested."""
SOON_SECONDS: Final = 15.0
"""Seconds that a requested comparison waits, so that requests at about the same time share one."""
ECHO_SECONDS: Final = 20.0
"""Seconds that a comparison waits for watches to deliver a change."""


class RestoredError(Exception):
    """A version in a listing is lower than one known before."""


class Resync:
    """Compares the index with the cluster."""

    def __init__(
        self,
        client: KubernetesClient,
        index: Index,
        queue: WorkQueue,
        namespaces: Sequence[str],
    ) -> None:
        self._client, self._index, self._queue = client, index, queue
        self.watched: ResourceTable = WATCHED
        """The kinds that are compared."""
        self._places: list[str | None] = list(namespaces) or [None]
        self._rounds = 0
        self._listed: dict[str, int] = {}
        """Kind -> lowest version of the last listing."""
        self._asked = asyncio.Event()
        self.silent_rounds = 0
        """Consecutive comparisons that found a change no watch had delivered."""

    async def run(self) -> None:
        """Compare repeatedly. Raises RestoredError."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_SECONDS):
                    await self._asked.wait()
                    await asyncio.sleep(SOON_SECONDS)
            self._asked.clear()
            try:
                await self.compare()
            except ApiError as error:
                log.warning("the backstop could not list: %s", error)
            except RestoredError:
                raise
            except Exception:
                # Without the comparison the watches still work.
                log.exception("the backstop could not compare")

    def soon(self) -> None:
        """Request a comparison: a watch listed again or broke off, or a request had no answer."""
        self._asked.set()

    async def compare(self) -> None:
        """Compare once; correct the index and enqueue the jobs concerned."""
        late = 0
        for kind in self.watched:
            before, gone = self._index.stored_versions(kind), self._index.gone()
            listed: dict[str, dict[str, Any]] = {}
            versions: list[int] = []
            labels = "" if kind == names.KIND else names.LABEL_JOB_NAME
            for place in self._places:
                async for meta in self._client.metadata(kind, place, labels, versions.append):
                    if _key(kind, meta) is not None:
                        listed[str(meta.get("uid"))] = meta
            self._ensure_one_history(kind, before, listed, versions)
            for uid, (key, name, _) in before.items():
                if uid not in listed:
                    self._index.drop(kind, key, name, uid)
                    self._queue.add(key)
            await self._back(kind, listed, gone)
            late += await self._missed(kind, listed)
        self.silent_rounds = self.silent_rounds + 1 if late else 0
        self._rounds += 1
        if self._rounds % FULL_EVERY == 0:
            for key in self._index.jobs():
                self._queue.add(key)

    def _ensure_one_history(
        self,
        kind: str,
        before: Mapping[str, tuple[str, str, int]],
        listed: Mapping[str, dict[str, Any]],
        versions: Sequence[int],
    ) -> None:
        """Raise RestoredError if the listing is older than what was known.

        `before`: objects that were known when the listing began; `versions`: versions of the listing.
        """
        seen_versions = {uid: version for uid, (_, _, version) in before.items()}
        older = any(0 <= _version(meta) < seen_versions.get(uid, 0) for uid, meta in listed.items())
        if older or min(versions, default=0) < max(self._listed.get(kind, 0), max(seen_versions.values(), default=0)):
            plural = self.watched[kind].plural
            raise RestoredError(f"{plural} are older than before: etcd was restored, and the operator restarts")
        self._listed[kind] = min(versions, default=0)

    async def _back(self, kind: str, listed: Mapping[str, dict[str, Any]], gone: frozenset[str]) -> None:
        """Read listed objects again that were known to be gone before the listing."""
        for uid in gone & listed.keys():
            meta = listed[uid]
            key = str(_key(kind, meta))
            self._index.unlearn(kind, key, meta["name"], uid)
            body = await self._client.get(kind, meta["namespace"], meta["name"])
            if body is not None and body["metadata"]["uid"] == uid:
                self._index.put(kind, key, body)
            self._queue.add(key)

    async def _missed(self, kind: str, listed: dict[str, dict[str, Any]]) -> int:
        """Return the number of objects whose newest version the watch has not delivered even after a while.

        Read these objects again and put them into the index.
        """

        def outdated() -> list[str]:
            stored = self._index.stored_versions(kind)
            return [uid for uid, meta in listed.items() if stored.get(uid, ("", "", 0))[2] < _version(meta)]

        if not outdated():
            return 0
        await asyncio.sleep(ECHO_SECONDS)
        result = 0
        for uid in outdated():
            meta = listed[uid]
            body = await self._client.get(kind, meta["namespace"], meta["name"])
            if body is None or body["metadata"]["uid"] != uid:
                continue
            key = _key(kind, body["metadata"])
            if key is None or not self._taken(kind, key, uid, body):
                continue
            log.warning("the watch missed %s %s/%s", kind, meta["namespace"], meta["name"])
            self._queue.add(key)
            result += 1
        return result

    def _taken(self, kind: str, key: str, uid: str, body: dict[str, Any]) -> bool:
        """Put a body into the index; return whether that changed the known version."""
        before = self._index.stored_versions(kind).get(uid)
        self._index.put(kind, key, body)
        return self._index.stored_versions(kind).get(uid) != before


def _key(kind: str, meta: dict[str, Any]) -> str | None:
    body = {"metadata": meta}
    return key_of(body) if kind == names.KIND else owner_key(body)


def _version(meta: dict[str, Any]) -> int:
    """Return the resourceVersion, or -1 if it cannot be read."""
    try:
        return identity_of(meta).version
    except UnreadableError:
        return -1
