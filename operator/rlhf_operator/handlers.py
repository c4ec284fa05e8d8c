"""The wiring of kopf: what is watched, and how.

kopf logs in, lists, watches, and opens streams anew; each event is taken straight from its stream. Its reactor, which
gives every object a task, a queue and a memory of its own and builds twenty arguments for a handler, costs ten times
what reading the event costs, and an operator of pods lives on events.

Rule: an event only brings the index up to date and enqueues the job's key; nothing is decided here, nothing is written,
no finalizer and no annotation is ever set on an object. No job is enqueued before all first listings are complete: none
is ever reconciled against half of its pods. What a stream misses is found by `resync`. Whoever may write an object may
write nonsense, so a stream survives every event: one that cannot be taken in is counted and costs its object alone.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import kopf
from kopf._cogs.clients.errors import APIError
from kopf._cogs.clients.watching import Bookmark, WatchingError, infinite_watch
from kopf._cogs.structs.references import Resource

from rlhf_api import names
from rlhf_operator.index import Index, key_of, owner_key
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.untrusted import PARSER_LEVELS, UnreadableError, UnreadableObject, identity_of
from rlhf_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

Watched = Mapping[str, tuple[str, str, str]]
WATCHED: Final[Watched] = {
    names.KIND: (names.GROUP, names.VERSION, names.PLURAL),
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
}
"""Kind -> (group, version, plural), beside those of gangs and queues. Secrets are read by name and never listed."""

KOPF_IDENTITY: Final[Any] = "rlhf-operator"
"""Of kopf's own peering, which is off. Without one kopf looks the user's name up, and the user of a pod has none."""
AGAIN_SECONDS: Final = 5.0
"""Until a stream is opened again that the API server refused; kopf itself has tried for a minute by then."""


def telling(metrics: OperatorMetrics) -> Callable[[str, str, UnreadableObject], None]:
    """What an index tells of objects that cannot be read, as a metric and a line of the log."""

    def told(kind: str, key: str, what: UnreadableObject) -> None:
        metrics.unreadable.labels(kind.rpartition("/")[2]).inc()
        log.warning("%s: %s %s cannot be read: %s", key, kind, what.name, what.why, extra={"job": key})

    return told


class Intake:
    """Where events go: into the index, and their jobs into the queue when a decision about them may be another now."""

    def __init__(
        self,
        index: Index,
        queue: WorkQueue,
        metrics: OperatorMetrics,
        watched: Watched = WATCHED,
        streams: int = 0,
        on_listed_anew: Callable[[], None] = lambda: None,
    ) -> None:
        """`streams` have a first listing to come."""
        self.listed_anew = on_listed_anew
        """A stream could not go on where it was, and has listed again."""
        self._index, self._queue, self._metrics = index, queue, metrics
        self._plurals = {kind: plural for kind, (_, _, plural) in watched.items()}
        self._unlisted = streams
        self._early: set[str] = set()

    def listed(self) -> None:
        """The first listing of a stream is complete; with the last of them the work begins."""
        self._unlisted -= 1
        if self._unlisted == 0:
            for key in self._early:
                self._queue.add(key)
            self._early.clear()

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """One object of a listing (`type` is None), or one event. Never raises."""
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
        if event["type"] is not None:
            self._metrics.watch.labels(self._plurals[kind]).set(time.time())
        if key is None:
            return
        if event["type"] == "DELETED":
            gone = identity_of(body["metadata"])
            self._index.drop(kind, key, gone.name, gone.uid, body)
        elif not self._index.put(kind, key, body):
            return
        if self._unlisted > 0:
            self._early.add(key)
        else:
            self._queue.add(key)


async def _login(**given: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)


def settings(watched: Watched = WATCHED) -> kopf.OperatorSettings:
    """kopf's settings, each for a reason."""
    made = kopf.OperatorSettings()
    # Longer than an API server's own limits would close streams at random; kopf reconnects a silent one after 70 s.
    made.watching.server_timeout = 300
    made.watching.client_timeout = 310
    made.watching.connect_timeout = 30
    made.watching.chunk_size = 500
    for kind, (group, version, plural) in watched.items():
        if kind != names.KIND:
            place = f"{group}/{version}/{plural}" if group else f"{version}/{plural}"
            # Asked of the server: a cluster has many more pods than ours.
            made.watching.label_selectors[place] = names.LABEL_JOB_NAME
    made.networking.request_timeout = 30
    made.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21)
    # Events are ours to post, on transitions only.
    made.posting.enabled = False
    made.posting.loggers = False
    # What is watched is known; no rights to look at definitions and namespaces are needed.
    made.scanning.disabled = True
    made.process.ultimate_exiting_timeout = 20
    return made


async def watch(
    index: Index,
    queue: WorkQueue,
    metrics: OperatorMetrics,
    namespaces: Sequence[str],
    ready: asyncio.Event,
    watched: Watched = WATCHED,
    on_listed_anew: Callable[[], None] = lambda: None,
) -> None:
    """Watches until it is cancelled, in all namespaces when none is named; sets `ready` when it has started."""
    made, registry = settings(watched), kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login)
    everywhere: Sequence[str | None] = namespaces or [None]
    places = [(kind, namespace) for kind in watched for namespace in everywhere]
    intake = Intake(index, queue, metrics, watched, len(places), on_listed_anew)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), PARSER_LEVELS))

    async def streams() -> None:
        async with asyncio.TaskGroup() as tasks:
            for kind, namespace in places:
                tasks.create_task(_stream(made, kind, watched[kind], namespace, intake), name=f"watch of {kind}")

    await kopf.operator(
        ready_flag=ready,
        identity=KOPF_IDENTITY,
        registry=registry,
        settings=made,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        # Runs with kopf's credentials, in place of its reactor.
        _command=streams(),
    )


async def _stream(
    made: kopf.OperatorSettings, kind: str, place: tuple[str, str, str], namespace: str | None, intake: Intake
) -> None:
    """One stream, for ever: what exists, then what happens."""
    resource: Any = Resource(*place, kind=kind, namespaced=True, preferred=True, verbs=frozenset({"list", "watch"}))
    listing = True
    while True:
        try:
            async for event in infinite_watch(settings=made, resource=resource, namespace=namespace):  # type: ignore[arg-type]
                if event is Bookmark.LISTED:
                    if listing:
                        listing = False
                        intake.listed()
                    else:
                        intake.listed_anew()
                elif not isinstance(event, Bookmark) and event["type"] != "BOOKMARK":
                    intake.take(kind, event)
        except (APIError, WatchingError) as error:
            log.warning("%s cannot be watched: %s", place[2], error)
            await asyncio.sleep(AGAIN_SECONDS)
        except Exception:
            # Of kopf or of the answer: the other streams go on, and the next listing tells what this one missed.
            log.exception("the watch of %s is opened again", place[2])
            await asyncio.sleep(AGAIN_SECONDS)
