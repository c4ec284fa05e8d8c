"""What the controller does when a call fails, when it is killed between two writes, and when an object is not ours."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.support.controlled_cluster import KEY, ControlledCluster, made
from tests.support.fake_api_server import FakeApiServer
from tests.support.simulated_cluster import stored_job

from rlhf_api import names
from rlhf_operator import controller as controller_module
from rlhf_operator import job_objects
from rlhf_operator.api_client.errors import ApiError, RefusedError, UnavailableError
from rlhf_operator.reconcile.phases import REFUSED_RETRY_SECONDS

Json = dict[str, Any]
PODS = ["job-coordinator", "job-generation-0", "job-inference-0", "job-training-0"]
RANKS = {"parallelism": {"pipeline": 1}, "microBatchSize": 8}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as running:
        running.put(names.KIND, small_job())
        yield running


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other, so that the n-th write is the same one in every run."""
    monkeypatch.setattr(job_objects, "AT_ONCE", 1)


def small_job() -> Json:
    """Return a stored job of four pods."""
    return stored_job(generation={"replicas": 1}, training=RANKS)


def writes(server: FakeApiServer) -> list[tuple[str, str]]:
    """Return the writes, but for events, which are posted in the background."""
    return [write for write in server.writes() if "/events" not in write[1]]


async def undisturbed() -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Return what is made of the job when nothing goes wrong, and by which writes."""
    async with FakeApiServer() as server:
        server.put(names.KIND, small_job())
        async with ControlledCluster(server) as operator:
            await operator.settle()
        return made(server), writes(server)


async def test_a_job_gets_its_objects_and_a_settled_one_costs_no_write(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
        assert made(server)["Pod"] == PODS
        assert operator.errors == []
        before = len(server.writes())
        await operator.reconcile()
        assert len(server.writes()) == before
    async with ControlledCluster(server) as successor:
        await successor.settle()
        assert made(server)["Pod"] == PODS
        assert writes(server)[-1][1].endswith("/status") or len(server.writes()) == before


@pytest.mark.parametrize(
    ("code", "after"),
    [(500, True), (409, False), (403, False)],
    ids=["answer lost", "conflict", "forbidden"],
)
async def test_whichever_write_fails_once_the_job_gets_the_same_objects_once(
    code: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, undisturbed_writes = await undisturbed()
    for failing in range(len(undisturbed_writes)):
        async with FakeApiServer() as server:
            server.put(names.KIND, small_job())
            seen = 0

            def fail_one(method: str, path: str, server: FakeApiServer = server, failing: int = failing) -> None:
                nonlocal seen
                if method != "GET" and "/events" not in path:
                    if seen == failing:
                        server.fail(method, path, code, after=after)
                    seen += 1

            server.before_answer = fail_one
            async with ControlledCluster(server) as operator:
                await operator.settle()
                if code == 403 and made(server) != expected:
                    # What was refused is told first, and tried again when its time has come.
                    monkeypatch.setattr(job_objects, "clock", lambda: time.monotonic() + REFUSED_RETRY_SECONDS)
                    await operator.settle()
                    monkeypatch.setattr(job_objects, "clock", time.monotonic)
            assert made(server) == expected, f"write {failing}: {undisturbed_writes[failing]}"


async def test_an_operator_that_is_killed_between_any_two_writes_is_gone_on_for_by_the_next() -> None:
    expected, undisturbed_writes = await undisturbed()
    for last in range(len(undisturbed_writes)):
        async with FakeApiServer() as server:
            server.put(names.KIND, small_job())
            carried_out = 0
            async with ControlledCluster(server) as killed:
                life = asyncio.create_task(killed.settle())

                def kill(method: str, path: str, life: asyncio.Task[None] = life, last: int = last) -> None:
                    nonlocal carried_out
                    if method != "GET" and "/events" not in path:
                        if carried_out == last:
                            life.cancel()
                        carried_out += 1

                server.before_answer = kill
                await asyncio.gather(life, return_exceptions=True)
                server.before_answer = lambda method, path: None
            uids = {place: body["metadata"]["uid"] for place, body in server.objects.items()}
            async with ControlledCluster(server) as successor:
                await successor.settle()
            assert made(server) == expected, f"killed at write {last}: {undisturbed_writes[last]}"
            assert {place: server.objects[place]["metadata"]["uid"] for place in uids} == uids, "nothing is made twice"


async def test_an_object_that_is_not_the_jobs_is_left_as_it_is_and_no_pod_is_made_behind_it(
    server: FakeApiServer,
) -> None:
    strange = server.put(
        "Service",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "team", "name": "job", "labels": {names.LABEL_JOB_NAME: "job"}},
            "spec": {"ports": [{"port": 80}]},
        },
    )
    before = copy.deepcopy(strange)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        assert server.get("Service", "team", "job") == before
        assert made(server)["Pod"] == []
        assert "Service job" in operator.condition("Running")["message"]
        server.drop("Service", "team", "job")
        await operator.settle()
        assert made(server)["Pod"] == PODS


async def test_a_pod_with_the_jobs_labels_and_another_owner_is_neither_taken_nor_deleted(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
    body = copy.deepcopy(server.get("Pod", "team", "job-generation-0"))
    assert body is not None
    body["metadata"] |= {"name": "imposter", "uid": "uid-imposter", "ownerReferences": []}
    server.put("Pod", body)
    async with ControlledCluster(server) as operator:
        await operator.settle()
    assert server.names("Pod") == sorted([*PODS, "imposter"])
    assert not [write for write in server.writes() if write[0] == "DELETE"]


async def test_a_job_that_was_replaced_meanwhile_is_not_written_to(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        operator.see()
        server.drop(names.KIND, "team", "job")
        later = small_job()
        later["metadata"] |= {"uid": "another-uid"}
        server.put(names.KIND, later)
        assert await operator.controller.reconcile(KEY) == controller_module.CONFLICT_RETRY_SECONDS
        assert (server.get(names.KIND, "team", "job") or {}).get("status") is None
        assert made(server)["Pod"] == []


async def test_nothing_follows_a_status_that_could_not_be_written(server: FakeApiServer) -> None:
    server.fail("PATCH", "/status", 503, times=1)
    async with ControlledCluster(server) as operator:
        with pytest.raises(UnavailableError):
            await operator.reconcile()
        paths = [path for method, path in writes(server) if "/pods" not in path]
        assert [path.rpartition("/")[2] for path in paths] == ["status"], "pods are only tried, and nothing is stored"
        assert made(server)["ConfigMap"] == []
        await operator.settle()
        assert made(server)["Pod"] == PODS


async def test_a_job_that_is_gone_costs_no_request_and_is_forgotten(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
        server.drop(names.KIND, "team", "job")
        before = len(server.requests)
        assert await operator.reconcile() is None
        assert len(server.requests) == before


@pytest.mark.parametrize(
    ("error", "reason"), [(RefusedError("no"), "RefusedError"), (RuntimeError("a bug"), "Bug")], ids=["refusal", "bug"]
)
async def test_a_reconcile_that_raises_is_counted_and_raised(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(controller_module, "reconcile", fail)
    async with ControlledCluster(server) as operator:
        with pytest.raises(ApiError if reason == "RefusedError" else RuntimeError):
            await operator.reconcile()
        name = "rlhf_operator_reconcile_errors_total"
        assert operator.metrics.registry.get_sample_value(name, {"reason": reason}) == 1
