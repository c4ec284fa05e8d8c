"""Exchanges state with queues: reads it for a job, writes reports, and deletes gang objects.

A report is written to the version that was read, so that no change of the queue is lost.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import RefusedError
from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import QueueApi, QueueState, WorkloadReport
from rlhf_operator.gang.registry import queue_api_of, queue_apis
from rlhf_operator.index import Index
from rlhf_operator.reconcile.timestamps import rfc3339
from rlhf_operator.untrusted import UnreadableError, owner_of

Json = dict[str, Any]
Record = TypeVar("Record")

log = logging.getLogger(__name__)

READ_SECONDS: Final = 60.0
"""Seconds until a flavor or a class is read again."""


class Queueing:
    """Reads and writes the objects of queues for the controller."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self.served = ServedApis()
        self._read_at: dict[tuple[str, str], tuple[float, Json]] = {}

    async def state(self, index: Index, key: str, job: Json) -> QueueState | None:
        """Return the state of the first queue that has an object of a stored job; None if no backend has a queue.

        Without an object, it is the first queue that the cluster serves, or else the first one.
        """
        uid = str(job["metadata"]["uid"])
        queues = [(api, self.served.version(mode), index.queue_object(key, uid, api)) for mode, api in queue_apis()]
        if not queues:
            return None
        api, version, queue_object = min(queues, key=lambda queue: (queue[2] is None, queue[1] is None))
        references = () if version is None else api.references(version, job, queue_object)
        records = {reference: await self._record(api, *reference) for reference in references}
        return api.state(job, queue_object, records)

    async def _record(self, api: QueueApi, kind: str, name: str) -> object:
        """Return the record of an object without a namespace; None if it cannot be read."""
        body = await self._read(kind, name)
        return _read_as(lambda body: api.parse_reference(kind, body), kind.rpartition("/")[2], name, body)

    async def _read(self, kind: str, name: str) -> Json | None:
        """Return an object without a namespace, at most READ_SECONDS old; None if it is missing or may not be read."""
        read_at, body = self._read_at.get((kind, name), (0.0, {}))
        if body and time.monotonic() - read_at < READ_SECONDS:
            return body
        try:
            result = await self._client.get(kind, None, name)
        except RefusedError as error:
            log.warning("%s %s cannot be read: %s", kind, name, error)
            return None
        self._read_at[kind, name] = time.monotonic(), result or {}
        return result

    async def withdraw(self, index: Index, key: str, uid: str, places: Sequence[tuple[str, str]]) -> None:
        """Delete objects of the gang of the job of that uid."""
        for kind, name in places:
            there = index.other(key, uid, kind, name)
            if there is not None:
                await self._client.delete(kind, key.partition("/")[0], name, there)

    async def report(self, index: Index, key: str, uid: str, report: WorkloadReport, now: datetime) -> None:
        """Write the report into the status of the job's object in the queue, or of all of them if it names none.

        Raises ConflictError if an object has changed since it was read.
        """
        namespace = key.partition("/")[0]
        for kind, name in index.applied(key, uid):
            api = queue_api_of(kind) if report.name in ("", name) else None
            body = await self._client.get(kind, namespace, name) if api is not None else None
            if api is None or body is None or owner_of(body["metadata"]) != uid:
                continue
            reported = _read_as(partial(api.with_report, report=report, now=rfc3339(now)), kind, name, body)
            if reported is not None:
                index.put(kind, key, await self._client.replace_status(reported))


def _read_as(reader: Callable[[Json], Record], kind: str, name: str, body: Json | None) -> Record | None:
    """Return the record of an object; log it and return None if it cannot be read."""
    try:
        return None if body is None else reader(body)
    except UnreadableError as error:
        log.warning("%s %s cannot be read: %s", kind, name, error)
        return None
