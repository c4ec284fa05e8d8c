"""The wiring of kopf: what is watched, and how.

Rule: handlers only bring the index up to date and enqueue the job's key; nothing is decided here, nothing is written,
no finalizer and no annotation is ever set on an object. kopf drops errors of such handlers, so there is nothing in them
that can fail. The indexing handlers make kopf hold back every event until all first listings are complete: a job is
never reconciled against half of its pods. They matter until then only, and every handler costs time with every event,
so from the first event on they are left out.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import kopf

from rlhf_api import names
from rlhf_operator.index import Index, key_of, owner_key
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.stateless import NoDiffBase, NoProgress
from rlhf_operator.workqueue import WorkQueue

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


def job_key(kind: str, body: Any) -> str | None:
    """Key of the job that an object is or belongs to."""
    return key_of(body) if kind == names.KIND else owner_key(body)


class _Intake:
    """Where events go: into the index, and their jobs into the queue when a decision about them may be another now."""

    def __init__(self, index: Index, queue: WorkQueue, metrics: OperatorMetrics, watched: Watched) -> None:
        self._index, self._queue, self._metrics, self._watched = index, queue, metrics, watched
        self._listing = True
        self._listed: set[str] = set()

    def listing(self, **_: Any) -> bool:
        """The first listings are not complete."""
        return self._listing

    def seen(self, kind: str, body: Mapping[str, Any]) -> None:
        """An object of the first listings."""
        key = job_key(kind, body)
        if key is None:
            return
        self._index.put(kind, key, body)
        if self._listing:
            self._listed.add(key)
        else:
            self._queue.add(key)

    def happened(self, kind: str, event: kopf.RawEvent) -> None:
        """Any event; the first one says that the listings are complete."""
        if self._listing:
            self._listing = False
            for each in self._listed:
                self._queue.add(each)
            self._listed.clear()
        body = event["object"]
        self._metrics.watch.labels(self._watched[kind][2]).set(time.time())
        key = job_key(kind, body)
        if key is None:
            return
        if event["type"] == "DELETED":
            self._index.drop(kind, key, str(body["metadata"]["name"]), str(body["metadata"]["uid"]), body)
            self._queue.add(key)
        elif self._index.put(kind, key, body):
            self._queue.add(key)


def registry(
    index: Index, queue: WorkQueue, metrics: OperatorMetrics, watched: Watched = WATCHED
) -> kopf.OperatorRegistry:
    """The handlers of this operator."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(_login)
    intake = _Intake(index, queue, metrics, watched)
    for kind, place in watched.items():
        _watch(made, kind, place, intake)
    return made


async def _login(**given: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)


def _watch(made: kopf.OperatorRegistry, kind: str, place: tuple[str, str, str], intake: _Intake) -> None:
    async def seen(body: kopf.Body, **_: Any) -> None:
        intake.seen(kind, dict(body))

    async def event(event: kopf.RawEvent, **_: Any) -> None:
        intake.happened(kind, event)

    kopf.index(*place, id=f"{place[0]}-{place[2]}-seen", registry=made, when=intake.listing)(seen)
    kopf.on.event(*place, id=f"{place[0]}-{place[2]}-event", registry=made)(event)


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
    made.persistence.diffbase_storage = NoDiffBase()
    made.persistence.progress_storage = NoProgress()
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
    made: kopf.OperatorRegistry, namespaces: Sequence[str], ready: asyncio.Event, watched: Watched = WATCHED
) -> None:
    """Runs kopf until it is cancelled, in all namespaces when none is named; sets `ready` when it has started."""
    await kopf.operator(
        ready_flag=ready,
        identity=KOPF_IDENTITY,
        registry=made,
        settings=settings(watched),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
    )
