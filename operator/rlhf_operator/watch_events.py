"""Handles watch events: updates the index and enqueues the job's key if that was news.

The handler enqueues no job before the first listings are complete, because it would be reconciled with only some of its
pods. An event that cannot be processed is counted and logged.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.api_client.resources import CORE_RESOURCES, Resource, ResourceTable
from rlhf_operator.index import Index, key_of, owner_key
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.untrusted import UnreadableError, UnreadableObject, identity_of
from rlhf_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

WATCHED: Final[ResourceTable] = {
    kind: CORE_RESOURCES[kind] for kind in (names.KIND, "Pod", "Service", "ConfigMap", "NetworkPolicy")
}
"""The watched kinds, besides those of gangs and queues. Secrets are read by name and never listed."""


def unreadable_reporter(metrics: OperatorMetrics) -> Callable[[str, str, UnreadableObject], None]:
    """Return the index's callback for an unreadable object, which counts and logs it."""

    def report(kind: str, key: str, unreadable: UnreadableObject) -> None:
        metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
        log.warning("%s: %s %s cannot be read: %s", key, kind, unreadable.name, unreadable.why, extra={"job": key})

    return report


class WatchEventHandler:
    """Puts events into the index, and enqueues their jobs if decisions may change."""

    def __init__(
        self,
        index: Index,
        queue: WorkQueue,
        metrics: OperatorMetrics,
        first_listings: int = 0,
        on_relist: Callable[[], None] = lambda: None,
    ) -> None:
        """`first_listings`: expected number of first listings; `on_relist` is called when a watch has listed again."""
        self._index, self._queue, self._metrics = index, queue, metrics
        self._first_listings, self._on_relist = first_listings, on_relist
        self._early: set[str] = set()

    def first_listed(self) -> None:
        """Note that the first listing of a stream is complete; reconciling starts after the last one."""
        self._first_listings -= 1
        if self._first_listings == 0:
            for key in self._early:
                self._queue.add(key)
            self._early.clear()

    def relisted(self, resource: Resource) -> None:
        """Note that a watch has listed again."""
        self._metrics.relists.labels(resource.plural).inc()
        self._on_relist()

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """Process one object of a listing (`type` is None) or one event. Never raises."""
        try:
            self._take(kind, event)
        except UnreadableError as error:
            self._metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
            log.warning("an event of %s cannot be read: %s", kind, error)
        except Exception:
            self._metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
            log.exception("an event of %s cannot be processed", kind)

    def _take(self, kind: str, event: Mapping[str, Any]) -> None:
        body = event["object"]
        key = key_of(body) if kind == names.KIND else owner_key(body)
        if key is None:
            return
        if event["type"] == "DELETED":
            gone = identity_of(body["metadata"])
            self._index.drop(kind, key, gone.name, gone.uid, body)
        elif not self._index.put(kind, key, body):
            return
        if self._first_listings > 0:
            self._early.add(key)
        else:
            self._queue.add(key)


class ResourceConsumer:
    """Receiver of the objects of one reflector."""

    def __init__(self, handler: WatchEventHandler, metrics: OperatorMetrics, kind: str, resource: Resource) -> None:
        self._handler, self._kind, self._resource = handler, kind, resource
        self._watch_alive = metrics.watch_alive
        self._last_event = metrics.watch.labels(resource.plural)
        self._listed = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one object or event."""
        if event["type"] is not None:
            self._last_event.set(time.time())
        self._handler.take(self._kind, event)

    def listed(self) -> None:
        """Note that a listing is complete."""
        self.alive()
        if self._listed:
            self._handler.relisted(self._resource)
        else:
            self._listed = True
            self._handler.first_listed()

    def alive(self) -> None:
        """Note that the API server has sent something."""
        self._watch_alive.labels(self._resource.plural).set(time.time())
