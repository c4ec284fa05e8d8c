"""Posts events on RLHFJobs in the background.

A caller of `post` does not wait for the API server. An event that cannot be posted is dropped and logged.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError
from rlhf_operator.reconcile.reconcile_plan import JobEvent

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Most posts in flight."""
MAX_WAITING: Final = 1000
"""Maximum posts in progress; further events are dropped to bound memory."""
NOTE_MAX: Final = 1024
"""Bytes of a note that the API server accepts."""
REPORTER: Final = f"{names.GROUP}/operator"


class EventPoster:
    """Posts events on RLHFJobs."""

    def __init__(self, client: KubernetesClient, instance: str) -> None:
        """`instance` names this process in every event; at most 128 characters of it are used."""
        self._client = client
        self._instance = instance[:128]
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0

    def post(self, job: dict[str, Any], event: JobEvent) -> None:
        """Log an event. Post it in the background, unless MAX_WAITING posts are in progress."""
        kind = logging.WARNING if event.warning else logging.INFO
        meta = job["metadata"]
        key = f"{meta['namespace']}/{meta['name']}"
        log.log(kind, "%s: %s: %s", key, event.reason, event.message, extra={"job": key, "event": event.reason})
        if len(self._tasks) >= MAX_WAITING:
            log.warning("%s: the event %s is dropped, too many wait", key, event.reason, extra={"job": key})
            return
        task = asyncio.create_task(self._post(self._manifest(meta, event)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _manifest(self, meta: dict[str, Any], event: JobEvent) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{self._number():016x}", "namespace": meta["namespace"]},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": REPORTER,
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": event.message.encode(errors="replace")[:NOTE_MAX].decode(errors="ignore"),
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
                "resourceVersion": meta["resourceVersion"],
            },
        }

    def _number(self) -> int:
        """Return a number that grows with each call, about the nanoseconds since 1970."""
        self._last = max(self._last + 1, time.time_ns())
        return self._last

    async def _post(self, manifest: dict[str, Any]) -> None:
        try:
            async with self._slots:
                await self._client.create(manifest)
        except ApiError as error:
            log.warning("the event %s could not be posted: %s", manifest["reason"], error)

    async def close(self) -> None:
        """Wait for the posts in progress."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
