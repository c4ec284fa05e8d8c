"""The operator's watches: RLHFJobs with kopf, the objects of jobs with reflectors on the shared client.

Rule: a watch hands over objects and decides nothing.
"""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import kopf

from rlhf_common import names
from rlhf_operator.api_client.reflector import Reflector
from rlhf_operator.api_client.resources import CORE_RESOURCES, ResourceTable
from rlhf_operator.api_client.transport import Transport
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.untrusted import PARSER_LEVELS
from rlhf_operator.watch_events import ResourceConsumer, WatchEventHandler

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
"""Least seconds until kopf is restarted after it has ended, such as without permission to list RLHFJobs."""
KOPF_IDENTITY: Final[Any] = "rlhf-operator"
"""Identity for kopf's peering, which is off."""


class _NoDiffBase(kopf.DiffBaseStorage):
    """Stores no last state, because no handler asks for differences."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    """Stores no progress."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21)
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    # The operator posts events itself.
    settings.posting.enabled = False
    settings.posting.loggers = False
    # The watched kinds are known, so no permission to read definitions and namespaces is needed.
    settings.scanning.disabled = True
    # kopf must not end the process itself.
    settings.process.ultimate_exiting_timeout = None
    return settings


async def _login(**arguments: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


class JobWatch:
    """The watch of RLHFJobs with kopf."""

    def __init__(self, handler: WatchEventHandler, metrics: OperatorMetrics, namespaces: Sequence[str]) -> None:
        """`namespaces`: those to watch; all if it is empty."""
        self._namespaces = list(namespaces)
        resource = CORE_RESOURCES[names.KIND]
        self._consumer = ResourceConsumer(handler, metrics, names.KIND, resource)
        self._handler, self._resource = handler, resource
        self._listed: set[str] = set()
        """uids in the current listing; a repeated uid means that a new listing has begun."""

    async def run(self, until_served: Callable[[], Awaitable[None]]) -> None:
        """Watch until cancelled. `until_served` waits until RLHFJobs are served, and is awaited before each restart."""
        while True:
            try:
                await self._kopf()
                log.warning("kopf has ended and is started again")
            except Exception as error:
                log.warning("%s cannot be watched: %s", names.PLURAL, error.args[0] if error.args else error)
            await until_served()
            await asyncio.sleep(RETRY_SECONDS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one object of a listing or one event."""
        self._consumer.alive()
        uid = str((event["object"].get("metadata") or {}).get("uid"))
        if event["type"] == "DELETED":
            self._listed.discard(uid)
        elif event["type"] is None:
            if uid in self._listed:
                self._listed.clear()
                self._handler.relisted(self._resource)
            self._listed.add(uid)
        self._consumer.take(event)

    async def _kopf(self) -> None:
        """Run kopf in its thread until it ends or this task is cancelled. Raises kopf's error."""
        loop = asyncio.get_running_loop()
        stops: list[Callable[[], object]] = []
        ended: asyncio.Future[None] = loop.create_future()

        async def hand_over(event: Mapping[str, Any], **_: Any) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.take, event)

        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)(hand_over)

        async def operate() -> None:
            # kopf accepts several kinds of flags; only one of its own loop lets that loop end when kopf ends by itself.
            stop, own = asyncio.Event(), asyncio.get_running_loop()
            stops.append(lambda: own.call_soon_threadsafe(stop.set))
            await kopf.operator(
                identity=KOPF_IDENTITY,
                registry=registry,
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=stop,
            )

        def serve() -> None:
            error: BaseException | None = None
            try:
                asyncio.run(operate())
            except Exception as problem:
                error = problem
            # This loop is closed if the process ends without waiting for the thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended, error)

        threading.Thread(target=serve, name="kopf", daemon=True).start()
        try:
            await ended
        finally:
            for stop in stops:
                # kopf's loop is closed if it has ended.
                with contextlib.suppress(RuntimeError):
                    stop()


def _settle(ended: "asyncio.Future[None]", error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


async def watch(
    transport: Transport,
    handler: WatchEventHandler,
    metrics: OperatorMetrics,
    namespaces: Sequence[str],
    watched: ResourceTable,
    until_served: Callable[[], Awaitable[None]],
) -> None:
    """Watch until cancelled, in all namespaces if none is named.

    `watched` has RLHFJobs and the kinds of their objects. `until_served` waits until the API server serves RLHFJobs.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), PARSER_LEVELS))
    places: Sequence[str | None] = namespaces or [None]
    async with asyncio.TaskGroup() as tasks:
        for kind, resource in watched.items():
            for namespace in places if kind != names.KIND else ():
                consumer = ResourceConsumer(handler, metrics, kind, resource)
                # The server filters by label, because a cluster has many more pods than ours.
                reflector = Reflector(transport, resource, namespace, consumer, names.LABEL_JOB_NAME)
                tasks.create_task(reflector.run(), name=f"watch of {kind}")
        tasks.create_task(JobWatch(handler, metrics, namespaces).run(until_served), name=f"watch of {names.KIND}")


def first_listings(namespaces: Sequence[str], watched: ResourceTable) -> int:
    """Return the number of listings that must be complete before a job is reconciled: those of its objects' kinds."""
    return (len(watched) - 1) * max(1, len(namespaces))
