"""A controller and a fake API server: the controller sees the server's objects and reconciles until nothing changes.

Rule: the controller's knowledge comes from the server alone, so a new controller knows what a new process would after
its first listing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.operator.fake_api_server import FakeApiServer
from tests.support.operator.simulated_cluster import stored_job

from rlhf_common import names
from rlhf_operator.__main__ import RESOURCES
from rlhf_operator.api_client.errors import ApiError
from rlhf_operator.controller import Controller
from rlhf_operator.coordinator_client import Coordinators
from rlhf_operator.events import EventPoster
from rlhf_operator.index import Index, key_of, owner_key
from rlhf_operator.manifests import Images
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile_traces import ReconcileTraces
from rlhf_operator.watch_events import WATCHED

Json = dict[str, Any]
KEY = "team/job"
SOON_SECONDS = 5.0
"""Longest delay in seconds of a reconcile that continues what the last one began."""
MAX_ROUNDS = 12
"""Reconciles after which an unsettled job counts as endless."""
PODS = ["job-coordinator", "job-generation-0", "job-inference-0", "job-training-0"]
"""Names of the pods of `small_job`."""


class ControlledCluster:
    """One process of an operator; an async context manager."""

    def __init__(self, server: FakeApiServer, traces: ReconcileTraces | None = None) -> None:
        self.server = server
        self.metrics, self.index = OperatorMetrics(), Index()
        self.client = server.client()
        self.events = EventPoster(self.client, "operator-0")
        self.coordinators = Coordinators(lambda key: None)
        self.controller = Controller(
            self.client,
            self.index,
            Images(),
            self.metrics,
            self.coordinators,
            self.events,
            home="rlhf-system",
            traces=traces,
        )
        self.errors: list[ApiError] = []

    async def __aenter__(self) -> ControlledCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.coordinators.close()
        await self.events.close()
        await self.client.close()

    def see(self) -> None:
        """Deliver all objects of the server, and the deletion of all others, as watches would."""
        uids = set()
        for (path, _, _), body in list(self.server.objects.items()):
            kind = next(kind for kind, each in RESOURCES.items() if f"{each.prefix}/{each.plural}" == path)
            key = key_of(body) if kind == names.KIND else owner_key(body)
            uids.add(body["metadata"]["uid"])
            if kind in WATCHED and key is not None:
                self.index.put(kind, key, body)
        for kind in WATCHED:
            for uid, (key, name, _) in self.index.stored_versions(kind).items():
                if uid not in uids:
                    self.index.drop(kind, key, name, uid)

    async def reconcile(self) -> float | None:
        """Deliver the objects and reconcile once; return the seconds until the next reconcile."""
        self.see()
        return await self.controller.reconcile(KEY)

    async def settle(self) -> None:
        """Reconcile until nothing changes; errors are stored, because the work queue would retry."""
        for _ in range(MAX_ROUNDS):
            before = self._versions()
            try:
                requeue_after = await self.reconcile()
            except ApiError as error:
                self.errors.append(error)
                continue
            await self.events.close()
            if self._versions() == before and (requeue_after is None or requeue_after > SOON_SECONDS):
                return
            await asyncio.sleep(0)
        raise AssertionError(f"never rests: {self.server.writes()[-6:]}")

    def _versions(self) -> dict[tuple[str, str, str], str]:
        """Return the resourceVersions of all objects but events."""
        objects = self.server.objects.items()
        return {place: body["metadata"]["resourceVersion"] for place, body in objects if "/events" not in place[0]}

    def condition(self, kind: str) -> Json:
        """Return a condition of the stored job; empty if it has none."""
        job = self.server.get(names.KIND, "team", "job") or {}
        listed = (job.get("status") or {}).get("conditions") or []
        return next((condition for condition in listed if condition["type"] == kind), {})


def object_names(server: FakeApiServer) -> dict[str, list[str]]:
    """Return the names of a job's objects by kind."""
    kinds = ("Pod", "Service", "ConfigMap", "Secret", "NetworkPolicy")
    return {kind: server.names(kind) for kind in kinds}


def small_job() -> Json:
    """Return a stored job of four pods."""
    return stored_job(generation={"replicas": 1}, training={"parallelism": {"pipeline": 1}, "microBatchSize": 8})


def writes(server: FakeApiServer) -> list[tuple[str, str]]:
    """Return the writes, except events, which are posted in the background."""
    return [write for write in server.writes() if "/events" not in write[1]]
