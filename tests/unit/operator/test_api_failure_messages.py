"""The condition or the event that says why the API server does not do what the controller asks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.controlled_cluster import PODS, ControlledCluster, object_names, writes
from tests.support.operator.fake_api_server import FakeApiServer

from rlhf_operator.api_client.errors import ApiError, UnavailableError

Json = dict[str, Any]
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
        assert len(writes(server)) == before, "the same failure writes no second status"
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
