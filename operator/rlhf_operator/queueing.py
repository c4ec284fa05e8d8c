"""The edge to queues: flavors that an admission names, what Kueue is told, gang objects that go.

Rule: decides nothing. Told under the version of the Workload that was read, so that nothing Kueue writes meanwhile is
lost; whoever was slower takes the turn again. Nothing here is remembered that a restart would miss.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from rlhf_operator.cluster import Cluster, RefusedError
from rlhf_operator.gang.apis import KUEUE, Served
from rlhf_operator.gang.kueue_workload import Placement, Report, Workload, flavor_of, is_workload, with_report
from rlhf_operator.index import Index
from rlhf_operator.reconcile.conditions import rfc3339

log = logging.getLogger(__name__)

FLAVOR_SECONDS: Final = 60.0
"""A flavor is read again after that: they change by an administrator's hand."""


class Queueing:
    """What the controller asks of queues."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.served = Served()
        self._flavors: dict[str, tuple[float, Placement | None]] = {}

    async def flavors(self, workload: Workload | None) -> Mapping[str, Placement]:
        """Flavors that an admission names, by name; one that cannot be read is left out."""
        version = self.served.version(KUEUE)
        if workload is None or version is None:
            return {}
        found = {}
        for name in {each for names in workload.flavors.values() for each in names}:
            read_at, flavor = self._flavors.get(name, (0.0, None))
            if flavor is None or time.monotonic() - read_at > FLAVOR_SECONDS:
                flavor = await self._flavor(version, name)
                self._flavors[name] = time.monotonic(), flavor
            if flavor is not None:
                found[name] = flavor
        return found

    async def _flavor(self, version: str, name: str) -> Placement | None:
        try:
            body = await self._cluster.get(f"{version}/ResourceFlavor", None, name)
        except RefusedError as error:
            log.warning("ResourceFlavor %s cannot be read: %s", name, error)
            return None
        return flavor_of(body) if body else None

    async def withdraw(self, index: Index, key: str, places: Sequence[tuple[str, str]]) -> None:
        """Deletes objects of a job's gang."""
        for kind, name in places:
            uid = index.other(key, kind, name)
            if uid is not None:
                await self._cluster.delete(kind, key.partition("/")[0], name, uid)

    async def report(self, index: Index, key: str, report: Report, now: datetime) -> None:
        """Writes into the status of the job's Workload. Raises ConflictError when it is another by now."""
        namespace = key.partition("/")[0]
        for kind, name in index.applied(key):
            body = await self._cluster.get(kind, namespace, name) if is_workload(kind) else None
            if body is not None:
                written = await self._cluster.replace_status(with_report(body, report, rfc3339(now)))
                index.put(kind, key, written)
