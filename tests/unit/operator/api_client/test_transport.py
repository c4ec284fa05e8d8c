"""Behaviour of a request if the API server rejects it, is overloaded, or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.support.operator.fake_api_server import FakeApiServer, until

from rlhf_operator.api_client import transport as transport_module
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    MissingError,
    RefusedError,
    UnavailableError,
    error_of,
)
from rlhf_operator.api_client.resources import CORE_RESOURCES
from rlhf_operator.api_client.transport import MAX_RETRIES, MAX_RETRY_SECONDS, ApiRequest, retry_seconds

PODS = CORE_RESOURCES["Pod"]
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team", "name": "p"}, "spec": {}}
LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"namespace": "team", "name": "l"}}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as running:
        yield running


@pytest_asyncio.fixture
async def client(server: FakeApiServer) -> AsyncIterator[KubernetesClient]:
    connected = server.client()
    yield connected
    await connected.close()


async def test_a_request_that_the_api_server_wants_again_is_sent_again(
    server: FakeApiServer, client: KubernetesClient
) -> None:
    answers: list[int] = []
    client.transport.on_answer = lambda verb, resource, code: answers.append(code)
    server.fail("POST", "/pods", 429, times=2, Retry_After="0")
    assert (await client.create(POD))["metadata"]["name"] == "p"
    assert answers == [429, 429, 201]


async def test_a_request_is_not_repeated_for_ever_and_the_lease_not_at_all(
    server: FakeApiServer, client: KubernetesClient
) -> None:
    server.fail("POST", "/pods", 503, times=100, Retry_After="0")
    with pytest.raises(UnavailableError, match="create pods: 503 injected"):
        await client.create(POD)
    assert len(server.writes()) == MAX_RETRIES + 1
    server.fail("POST", "/leases", 429, times=100, Retry_After="0")
    with pytest.raises(UnavailableError):
        await client.create(LEASE)
    assert len(server.writes()) == MAX_RETRIES + 2


async def test_a_failure_that_may_have_been_carried_out_is_the_callers_to_judge(
    server: FakeApiServer, client: KubernetesClient
) -> None:
    server.fail("POST", "/pods", 500, after=True)
    with pytest.raises(UnavailableError):
        await client.create(POD)
    with pytest.raises(ConflictError, match='create pods: pods "p" already exists') as conflict:
        await client.create(POD)
    assert (conflict.value.code, conflict.value.reason) == (409, "AlreadyExists")


@pytest.mark.parametrize(
    ("code", "header", "seconds"),
    [
        (429, "1", 1.0),
        (503, " 2 ", 2.0),
        (429, "3600", MAX_RETRY_SECONDS),
        (429, None, None),
        (500, None, None),
        (429, "Wed, 21 Oct 2026 07:28:00 GMT", None),
        (409, "1", None),
    ],
)
def test_only_an_answer_that_says_when_is_followed_by_the_request_again(
    code: int, header: str | None, seconds: float | None
) -> None:
    assert retry_seconds(code, header) == seconds


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, InvalidError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (405, RefusedError),
        (404, MissingError),
        (409, ConflictError),
        (410, MissingError),
        (422, InvalidError),
        (429, UnavailableError),
        (500, UnavailableError),
    ],
)
def test_an_error_is_named_for_what_can_be_done(code: int, kind: type[Exception]) -> None:
    error = error_of(code, b'{"kind": "Status", "message": "why", "reason": "Because"}', "get pods p")
    assert type(error) is kind
    assert (error.code, error.reason, error.request) == (code, "Because", "get pods p")
    assert "why" in str(error)


async def test_nobody_who_does_not_answer_is_waited_for_and_the_error_names_the_request(
    server: FakeApiServer, client: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "TIMEOUT_SECONDS", 0.2)
    hold = asyncio.Event()
    answers: list[int] = []
    client.transport.on_answer = lambda verb, resource, code: answers.append(code)
    server.hold = hold
    with pytest.raises(UnavailableError, match="get pods p: "):
        await client.get("Pod", "team", "p")
    hold.set()
    assert answers == [0]


async def test_a_stream_that_breaks_off_is_told_and_one_that_ends_or_was_never_answered_is_not(
    server: FakeApiServer, client: KubernetesClient
) -> None:
    """The caller then compares the whole list soon, because the API server may return with another history."""
    broken: list[str] = []
    client.transport.on_break = lambda: broken.append("broken")
    version = server.put("Pod", POD)["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version}

    async def follow(silence_seconds: float) -> None:
        stream = client.transport.lines(ApiRequest("watch", PODS, None), query, silence_seconds=silence_seconds)
        async for _ in stream:
            pass

    ending = asyncio.create_task(follow(60.0))
    await until(lambda: server.streams > 0)
    server.end_watches()
    await ending
    server.fail("GET", "/pods", 503)
    with pytest.raises(UnavailableError, match="watch pods: 503"):
        await follow(60.0)
    assert not broken
    with pytest.raises(UnavailableError, match="watch pods"):
        await follow(1.0)  # it is answered before, on a busy machine too
    assert broken == ["broken"]


async def test_no_more_requests_are_under_way_than_there_are_slots_and_a_lease_waits_for_none(
    server: FakeApiServer,
) -> None:
    connection = server.connection()
    client = KubernetesClient(transport_module.Transport(connection, concurrency=2))
    server.hold = asyncio.Event()
    asked = [asyncio.create_task(client.get("Pod", "team", f"p{number}")) for number in range(5)]
    try:
        await until(lambda: len(server.requests) == 2)
        lease = asyncio.create_task(client.get("Lease", "team", "l"))
        await until(lambda: len(server.requests) == 3)
        assert {path.rpartition("/")[0].rpartition("/")[2] for _, path in server.requests} == {"pods", "leases"}
        server.hold.set()
        assert await asyncio.gather(*asked, lease) == [None] * 6
    finally:
        await client.close()
