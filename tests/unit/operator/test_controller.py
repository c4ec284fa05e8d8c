"""The controller: objects of a job, failed calls, a kill between two writes, and changes while it plans."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import pytest
from tests.support.operator.controlled_cluster import KEY, PODS, ControlledCluster, object_names, small_job, writes
from tests.support.operator.fake_api_server import FakeApiServer

from rlhf_common import names
from rlhf_operator import controller as controller_module
from rlhf_operator import job_objects
from rlhf_operator.api_client.errors import ApiError, ConflictError, RefusedError, UnavailableError
from rlhf_operator.reconcile import ReconcilePlan
from rlhf_operator.reconcile.phases import REFUSED_RETRY_SECONDS


async def undisturbed() -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Return the job's objects and the writes of a run without errors."""
    async with FakeApiServer() as server:
        server.put(names.KIND, small_job())
        async with ControlledCluster(server) as operator:
            await operator.settle()
        return object_names(server), writes(server)


async def test_a_job_gets_its_objects_and_a_settled_one_costs_no_write(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
        assert object_names(server)["Pod"] == PODS
        assert operator.errors == []
        before = len(server.writes())
        await operator.reconcile()
        assert len(server.writes()) == before
    async with ControlledCluster(server) as successor:
        await successor.settle()
        assert object_names(server)["Pod"] == PODS
        assert writes(server)[-1][1].endswith("/status") or len(server.writes()) == before


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("in_order")
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
                if code == 403 and object_names(server) != expected:
                    # What was refused is told first, and tried again when its time has come.
                    monkeypatch.setattr(job_objects, "clock", lambda: time.monotonic() + REFUSED_RETRY_SECONDS)
                    await operator.settle()
                    monkeypatch.setattr(job_objects, "clock", time.monotonic)
            assert object_names(server) == expected, f"write {failing}: {undisturbed_writes[failing]}"


@pytest.mark.usefixtures("in_order")
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
            assert object_names(server) == expected, f"killed at write {last}: {undisturbed_writes[last]}"
            assert {place: server.objects[place]["metadata"]["uid"] for place in uids} == uids, "nothing is made twice"


async def test_a_job_that_was_replaced_meanwhile_is_not_written_to(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        operator.see()
        server.drop(names.KIND, "team", "job")
        later = small_job()
        later["metadata"] |= {"uid": "another-uid"}
        server.put(names.KIND, later)
        assert await operator.controller.reconcile(KEY) == controller_module.CONFLICT_RETRY_SECONDS
        assert (server.get(names.KIND, "team", "job") or {}).get("status") is None
        assert object_names(server)["Pod"] == []


async def test_nothing_follows_a_status_that_could_not_be_written(server: FakeApiServer) -> None:
    server.fail("PATCH", "/status", 503, times=1)
    async with ControlledCluster(server) as operator:
        with pytest.raises(UnavailableError):
            await operator.reconcile()
        paths = [path for method, path in writes(server) if "/pods" not in path]
        assert [path.rpartition("/")[2] for path in paths] == ["status"], "pods are only tried, and nothing is stored"
        assert object_names(server)["ConfigMap"] == []
        await operator.settle()
        assert object_names(server)["Pod"] == PODS


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


def label(server: FakeApiServer, **labels: str) -> None:
    """Add a label to the job."""
    job = copy.deepcopy(server.get(names.KIND, "team", "job"))
    assert job is not None
    job["metadata"]["labels"] = job["metadata"].get("labels", {}) | {f"{name}": text for name, text in labels.items()}
    server.put(names.KIND, job)


async def test_a_status_is_written_while_somebody_else_labels_the_job_again_and_again(server: FakeApiServer) -> None:
    times = 0

    def label_first(method: str, path: str) -> None:
        nonlocal times
        if method == "PATCH" and path.endswith("/status") and times < 5:
            times += 1
            label(server, color=str(times))

    server.before_answer = label_first
    async with ControlledCluster(server) as operator:
        assert await operator.reconcile() != controller_module.CONFLICT_RETRY_SECONDS
        assert operator.condition("Planned")["status"] == "True"
        assert (server.get(names.KIND, "team", "job") or {})["metadata"]["labels"]["color"] == "5"
        await operator.settle()
        assert object_names(server)["Pod"] == PODS


@pytest.mark.parametrize("change", ["generation", "queue", "status", "finalizer", "deletion"])
async def test_no_status_is_written_over_a_change_that_the_plan_does_not_know(
    server: FakeApiServer, change: str
) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
        operator.see()
        server.drop("Pod", "team", "job-generation-0")
        operator.index.drop_pod(KEY, "job-generation-0", "uid-of-another")
        job = copy.deepcopy(server.get(names.KIND, "team", "job"))
        assert job is not None
        if change == "generation":
            job["metadata"]["generation"] += 1
            job["spec"]["generation"]["replicas"] = 2
        elif change == "queue":
            job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
        elif change == "status":
            job["status"]["restarts"]["failures"] = 7
        elif change == "finalizer":
            job["metadata"]["finalizers"] = [names.FINALIZER]
        else:
            job["metadata"] |= {"deletionTimestamp": "2026-08-22T10:00:00Z", "finalizers": ["example.org/audit"]}
        stored = server.put(names.KIND, job)
        indexed = operator.index.job(KEY)
        assert indexed is not None
        plan = ReconcilePlan(status={**indexed["status"], "algorithm": "grpo"})
        with pytest.raises(ConflictError):
            await operator.controller._write_status(KEY, indexed, plan)
        assert (server.get(names.KIND, "team", "job") or {})["status"] == stored["status"]
