"""Rejected pods are retried less and less often, with one of them, and immediately after a change of the plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from tests.support.operator.controlled_cluster import ControlledCluster
from tests.support.operator.fake_api_server import FakeApiServer
from tests.support.operator.simulated_cluster import stored_job

from rlhf_common import names
from rlhf_operator import job_objects
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import RefusedError

BEGUN = datetime.now(UTC)
QUOTA = "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as running:
        running.put(names.KIND, stored_job())
        yield running


class Quota:
    """Rejects pods while it is full, and counts requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.asked, self.seconds = True, 0, 1000.0
        create = KubernetesClient.create

        async def refusing(client: KubernetesClient, manifest: dict[str, Any]) -> dict[str, Any]:
            if manifest["kind"] == "Pod":
                self.asked += 1
                if self.full:
                    raise RefusedError(QUOTA)
            return await create(client, manifest)

        monkeypatch.setattr(KubernetesClient, "create", refusing)
        monkeypatch.setattr(job_objects, "clock", lambda: self.seconds)

    def now(self) -> datetime:
        """Return the time of the controller, which writes a status again after some seconds."""
        return BEGUN + timedelta(seconds=self.seconds)


async def test_a_quota_is_tried_by_one_pod_and_ever_less_often(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = Quota(monkeypatch)
    async with ControlledCluster(server) as operator:
        operator.controller._clock = quota.now
        await operator.settle()
        first, tries = quota.asked, []
        for _ in range(360):
            quota.seconds += 5
            before = quota.asked
            await operator.reconcile()
            if quota.asked > before:
                assert quota.asked == before + 1
                tries.append(quota.seconds - 1000)
        assert first <= len(["coordinator", *range(5)])
        pauses = [round(later - earlier) for earlier, later in pairwise(tries)]
        assert pauses[:5] == [30, 60, 120, 240, 300]
        assert QUOTA in operator.condition("Running")["message"]
        quota.full = False
        quota.seconds += 300
        await operator.settle()
        assert len([name for (path, _, name) in server.objects if path.endswith("/pods")]) == 6


async def test_an_edit_is_tried_at_once(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota(monkeypatch)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        for _ in range(4):
            quota.seconds += 120
            await operator.reconcile()
        before = quota.asked
        await operator.reconcile()
        assert quota.asked == before
        job = server.get(names.KIND, "team", "job") or {}
        job["spec"]["generation"]["replicas"] = 1
        job["metadata"] |= {"generation": 2}
        quota.full = False
        server.put(names.KIND, job)
        await operator.settle()
        assert len([name for (path, _, name) in server.objects if path.endswith("/pods")]) == 5


async def test_what_goes_with_an_earlier_job_is_tried_again_within_seconds(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, seconds = KubernetesClient.create, [1000.0]
    leaving = True

    async def refusing(client: KubernetesClient, manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["kind"] == "Pod" and leaving:
            raise job_objects.LeavingError(
                "Pod job-coordinator belongs to an earlier job of this name and is deleted with it"
            )
        return await create(client, manifest)

    monkeypatch.setattr(KubernetesClient, "create", refusing)
    monkeypatch.setattr(job_objects, "clock", lambda: seconds[0])
    async with ControlledCluster(server) as operator:
        for _ in range(8):
            requeue_after = await operator.reconcile()
            assert requeue_after is not None
            assert requeue_after <= job_objects.LEAVING_SECONDS
        leaving = False
        seconds[0] += job_objects.LEAVING_SECONDS
        await operator.settle()
        assert len([name for (path, _, name) in server.objects if path.endswith("/pods")]) == 6
