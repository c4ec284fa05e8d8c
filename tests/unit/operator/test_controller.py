"""The controller after a failed call, after a kill between two writes, and with foreign objects."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.support.operator.controlled_cluster import KEY, ControlledCluster, object_names
from tests.support.operator.fake_api_server import FakeApiServer
from tests.support.operator.simulated_cluster import stored_job

from rlhf_common import names
from rlhf_operator import controller as controller_module
from rlhf_operator import job_objects
from rlhf_operator.api_client.errors import ApiError, ConflictError, RefusedError, UnavailableError
from rlhf_operator.reconcile import ReconcilePlan, job_status
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
    """Send one request after the other, so that the n-th write is the same in every run."""
    monkeypatch.setattr(job_objects, "AT_ONCE", 1)


def small_job() -> Json:
    """Return a stored job of four pods."""
    return stored_job(generation={"replicas": 1}, training=RANKS)


def writes(server: FakeApiServer) -> list[tuple[str, str]]:
    """Return the writes, except events, which are posted in the background."""
    return [write for write in server.writes() if "/events" not in write[1]]


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
        assert object_names(server)["Pod"] == []
        assert "Service job" in operator.condition("Running")["message"]
        server.drop("Service", "team", "job")
        await operator.settle()
        assert object_names(server)["Pod"] == PODS


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


async def test_a_pod_that_a_finalizer_keeps_is_deleted_once_a_minute_at_most(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the API server does not show that the deletion was forced."""
    async with ControlledCluster(server) as operator:
        await operator.settle()
        body = copy.deepcopy(server.get("Pod", "team", "job-generation-0"))
        assert body is not None
        asked = {"deletionTimestamp": "2026-08-22T10:00:00Z", "deletionGracePeriodSeconds": 30}
        body["metadata"] |= asked | {"finalizers": ["example.org/audit"]}

        def deletions() -> int:
            return len([path for method, path in server.writes() if method == "DELETE" and path.endswith("-0")])

        delays = []
        for _ in range(8):
            server.put("Pod", body)
            delays.append(await operator.reconcile())
        assert deletions() == 1
        assert all(delay is not None and delay > 5 for delay in delays[-2:]), "nothing is written, so nothing is to see"
        condition = operator.condition("Running")["message"]
        assert "job-generation-0 cannot go: finalizer example.org/audit of somebody else keeps" in condition
        monkeypatch.setattr(job_objects, "DELETE_AGAIN_SECONDS", 0.0)
        server.put("Pod", body)
        await operator.reconcile()
        assert deletions() == 2


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "NetworkPolicy", "Secret"])
async def test_an_object_that_a_finalizer_keeps_is_not_written_again_and_again_and_is_named(
    server: FakeApiServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_status, "PROGRESS_SECONDS", 0.0)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        name = server.names(kind)[-1]
        body = copy.deepcopy(server.get(kind, "team", name))
        assert body is not None
        asked = {"deletionTimestamp": "2026-08-22T10:00:00Z", "finalizers": ["example.org/audit"]}
        server.put(kind, {**body, "metadata": body["metadata"] | asked})
        operator.controller._certificates.forget(KEY)
        await operator.settle()
        before = writes(server)
        for _ in range(4):
            requeue_after = await operator.reconcile()
            assert requeue_after is None or requeue_after > 5
        assert [write for write in writes(server)[len(before) :] if write[0] != "POST"] == []
        message = operator.condition("Running")["message"]
        assert f"{kind} {name}" in message
        assert "cannot go: finalizer example.org/audit of somebody else keeps" in message
        server.drop("Pod", "team", "job-generation-0")
        await operator.settle()
        assert object_names(server)["Pod"] == (
            PODS if kind != "Secret" else [pod for pod in PODS if "generation" not in pod]
        )
        server.drop(kind, "team", name)
        operator.controller._certificates.forget(KEY)
        for _ in range(3):
            await operator.settle()
        assert name in object_names(server)[kind]
        assert object_names(server)["Pod"] == PODS


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
        known = operator.index.job(KEY)
        assert known is not None
        plan = ReconcilePlan(status={**known["status"], "algorithm": "grpo"})
        with pytest.raises(ConflictError):
            await operator.controller._write_status(KEY, known, plan)
        assert (server.get(names.KIND, "team", "job") or {})["status"] == stored["status"]


WEBHOOK = (
    'Internal error occurred: failed calling webhook "inject.mesh.example.org": failed to call webhook: Post '
    '"https://injector.mesh.svc:443/inject?timeout=10s": dial tcp 10.96.1.2:443: connect: connection refused'
)


async def test_a_pod_webhook_that_is_down_is_told_after_three_attempts_and_no_longer_when_it_is_up(
    server: FakeApiServer,
) -> None:
    server.fail("POST", "/pods", 500, times=10**6, message=WEBHOOK)
    async with ControlledCluster(server) as operator:
        await operator.reconcile()
        for attempt in range(1, 7):
            with pytest.raises(UnavailableError):
                await operator.reconcile()
            message = operator.condition("Running")["message"]
            assert message.startswith(
                f"the API server does not do what the operator asks (create pods: 500 {WEBHOOK}"
            ) == (attempt >= 3)
        assert "): see that the Service of that webhook has a pod that answers, or leave out namespace team" in message
        assert message.endswith("the operator tries again every minute. its pods are being created")
        server.failures.clear()
        for _ in range(3):
            await operator.settle()
        assert object_names(server)["Pod"] == PODS
        assert "does not do what the operator asks" not in operator.condition("Running")["message"]


async def test_what_ends_a_reconcile_before_its_status_is_told_as_well(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
    server.fail("GET", "/configmaps/", 503, times=10**6, message="etcd \x00 has no leader\n" * 100)
    async with ControlledCluster(server) as operator:
        for _ in range(4):
            with pytest.raises(UnavailableError):
                await operator.reconcile()
        message = operator.condition("Running")["message"]
        assert message.startswith(
            "the API server does not do what the operator asks (get configmaps job-job: 503 etcd "
        )
        assert len(message) < 1000
        before = len(writes(server))
        with pytest.raises(UnavailableError):
            await operator.reconcile()
        assert len(writes(server)) == before, "it is said once"
        server.failures.clear()
        await operator.settle()
        assert "does not do what the operator asks" not in operator.condition("Running")["message"]


def events(server: FakeApiServer) -> list[Json]:
    return [body for (path, _, _), body in server.objects.items() if path.endswith("/events")]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            500,
            "failed to create typed patch object (team/job; Kind=RLHFJob): .status.new: field not declared in schema",
        ),
        (422, 'RLHFJob.rlhf.dev "job" is invalid: status.groups[0].name: Unsupported value: "scoring"'),
    ],
)
async def test_a_definition_that_is_older_than_the_operator_is_told_by_an_event_with_the_command(
    server: FakeApiServer, code: int, words: str
) -> None:
    server.fail("PATCH", "/rlhfjobs/job/status", code, times=10**6, message=words)
    async with ControlledCluster(server) as operator:
        for _ in range(5):
            with pytest.raises(ApiError):
                await operator.reconcile()
        await operator.events.close()
        [event] = events(server)
        assert event["reason"] == "DefinitionTooOld"
        assert "`kubectl apply --server-side -f crds/rlhfjobs.yaml` of the operator's version" in event["note"]
        assert words[-40:] in event["note"]
        assert event["regarding"]["name"] == "job"
        server.failures.clear()
        await operator.settle()
        assert object_names(server)["Pod"] == PODS


async def test_a_status_that_cannot_be_written_for_another_reason_is_told_by_an_event(server: FakeApiServer) -> None:
    server.fail("PATCH", "/rlhfjobs/job/status", 403, times=10**6, message="rlhfjobs/status is forbidden")
    async with ControlledCluster(server) as operator:
        for attempt in range(1, 6):
            with pytest.raises(ApiError):
                await operator.reconcile()
            await operator.events.close()
            assert [event["reason"] for event in events(server)] == (["StatusNotWritten"] if attempt >= 3 else [])
