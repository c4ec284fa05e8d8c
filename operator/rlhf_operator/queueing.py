"""The edge to queues: flavors that an admission names, what Kueue is told, gang objects that go.

Rule: decides nothing. Told under the version of the Workload that was read, so that nothing Kueue writes meanwhile is
lost; whoever was slower takes the turn again. Nothing here is remembered that a restart would miss.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_operator.cluster import Cluster, RefusedError
from rlhf_operator.gang.apis import KUEUE, PRIORITY_CLASS, Served
from rlhf_operator.gang.kueue import priority_of
from rlhf_operator.gang.kueue_workload import (
    KueueWorkload,
    PodPlacement,
    QueuePriority,
    WorkloadReport,
    flavor_of,
    is_workload,
    priority_value,
    with_report,
)
from rlhf_operator.index import Index
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.untrusted import UnreadableError, owner_of

Json = dict[str, Any]
Record = TypeVar("Record")

log = logging.getLogger(__name__)

READ_SECONDS: Final = 60.0
"""A flavor or a class is read again after that: they change by an administrator's hand."""


class Queueing:
    """What the controller asks of queues."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.served = Served()
        self._read_at: dict[tuple[str, str], tuple[float, Json]] = {}

    async def flavors(self, workload: KueueWorkload | None) -> Mapping[str, PodPlacement]:
        """Flavors that an admission names, by name; one that cannot be read is left out."""
        version = self.served.version(KUEUE)
        if workload is None or version is None:
            return {}
        named = {each for names in workload.flavors.values() for each in names}
        bodies = {name: await self._read(f"{version}/ResourceFlavor", name) for name in named}
        found = {name: _read_as(flavor_of, "ResourceFlavor", name, body) for name, body in bodies.items()}
        return {name: each for name, each in found.items() if each is not None}

    async def priority(self, job: Json) -> QueuePriority | None:
        """The class that orders a stored job in its queue."""
        version, labels = self.served.version(KUEUE), job["metadata"].get("labels") or {}
        named = priority_of(labels, job.get("spec") or {})
        if version is None or named is None or QUEUE_LABEL not in labels:
            return None
        kind, name = named
        body = await self._read(PRIORITY_CLASS if kind == "PriorityClass" else f"{version}/{kind}", name)
        return QueuePriority(kind, name, _read_as(priority_value, kind, name, body))

    async def _read(self, kind: str, name: str) -> Json | None:
        """An object without a namespace, not older than READ_SECONDS; None when it is not there or may not be read."""
        read_at, body = self._read_at.get((kind, name), (0.0, {}))
        if body and time.monotonic() - read_at < READ_SECONDS:
            return body
        try:
            found = await self._cluster.get(kind, None, name)
        except RefusedError as error:
            log.warning("%s %s cannot be read: %s", kind, name, error)
            return None
        self._read_at[kind, name] = time.monotonic(), found or {}
        return found

    async def withdraw(self, index: Index, key: str, uid: str, places: Sequence[tuple[str, str]]) -> None:
        """Deletes objects of the gang of the job of that uid."""
        for kind, name in places:
            there = index.other(key, uid, kind, name)
            if there is not None:
                await self._cluster.delete(kind, key.partition("/")[0], name, there)

    async def report(self, index: Index, key: str, uid: str, report: WorkloadReport, now: datetime) -> None:
        """Writes into the status of the job's Workload. Raises ConflictError when it is another by now."""
        namespace = key.partition("/")[0]
        for kind, name in index.applied(key, uid):
            body = await self._cluster.get(kind, namespace, name) if is_workload(kind) else None
            if body is None or owner_of(body["metadata"]) != uid:
                continue
            told = _read_as(lambda each: with_report(each, report, rfc3339(now)), kind, name, body)
            if told is not None:
                index.put(kind, key, await self._cluster.replace_status(told))


def _read_as(reader: Callable[[Json], Record], kind: str, name: str, body: Json | None) -> Record | None:
    """The record of an object; None, said in the log, when it cannot be read, as when it may not be."""
    try:
        return None if body is None else reader(body)
    except UnreadableError as error:
        log.warning("%s %s cannot be read: %s", kind, name, error)
        return None
