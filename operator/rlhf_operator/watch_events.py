"""What a watch event leads to: the index is brought up to date, and the job's key is enqueued when that was news.

Rule: nothing is decided here and nothing is written. No job is enqueued before the first listings of all its objects'
kinds are complete: none is ever reconciled against half of its pods. Whoever may write an object may write nonsense, so
a watch survives every event: one that cannot be taken in is counted and costs its object alone.
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
"""The kinds that are watched, and beside them those of gangs and queues. Secrets are read by name and never listed."""


def unreadable_reporter(metrics: OperatorMetrics) -> Callable[[str, str, UnreadableObject], None]:
    """Return what an index calls for an object that cannot be read: it becomes a metric and a line of the log."""

    def report(kind: str, key: str, what: UnreadableObject) -> None:
        metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
        log.warning("%s: %s %s cannot be read: %s", key, kind, what.name, what.why, extra={"job": key})

    return report


class WatchEventHandler:
    """Takes events into the index, and enqueues their jobs when a decision about them may be another now."""

    def __init__(
        self,
        index: Index,
        queue: WorkQueue,
        metrics: OperatorMetrics,
        first_listings: int = 0,
        on_relist: Callable[[], None] = lambda: None,
    ) -> None:
        """`first_listings`: so many are to come; `on_relist` is called when a watch could not go on and lists anew."""
        self._index, self._queue, self._metrics = index, queue, metrics
        self._first_listings, self._on_relist = first_listings, on_relist
        self._early: set[str] = set()

    def first_listed(self) -> None:
        """Note that the first listing of a stream is complete; with the last of them the work begins."""
        self._first_listings -= 1
        if self._first_listings == 0:
            for key in self._early:
                self._queue.add(key)
            self._early.clear()

    def relisted(self, resource: Resource) -> None:
        """Note that a watch has listed anew: what was deleted meanwhile, no event tells."""
        self._metrics.relists.labels(resource.plural).inc()
        self._on_relist()

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take one object of a listing (`type` is None), or one event. Never raises."""
        try:
            self._take(kind, event)
        except UnreadableError as error:
            self._metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
            log.warning("an event of %s cannot be read: %s", kind, error)
        except Exception:
            self._metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
            log.exception("an event of %s cannot be taken in", kind)

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
    """What one reflector hands its objects to."""

    def __init__(self, handler: WatchEventHandler, metrics: OperatorMetrics, kind: str, resource: Resource) -> None:
        self._handler, self._kind, self._resource = handler, kind, resource
        self._watch_alive = metrics.watch_alive
        self._last_event = metrics.watch.labels(resource.plural)
        self._listed = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one object or event."""
        if event["type"] is not None:
            self._last_event.set(time.time())
        self._handler.take(self._kind, event)

    def listed(self) -> None:
        """Note that a listing is complete; the watch after it may say nothing for minutes, as nothing happens."""
        self.alive()
        if self._listed:
            self._handler.relisted(self._resource)
        else:
            self._listed = True
            self._handler.first_listed()

    def alive(self) -> None:
        """Note that the API server has said something."""
        self._watch_alive.labels(self._resource.plural).set(time.time())
