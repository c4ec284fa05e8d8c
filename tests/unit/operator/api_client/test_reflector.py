"""A reflector receives all changes despite broken streams, and reconnects with a spread delay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from tests.support.operator.fake_api_server import FakeApiServer, until

from rlhf_common import names
from rlhf_operator.api_client import reflector as reflector_module
from rlhf_operator.api_client.reflector import LAST_BACK_OFF_SECONDS, Reflector
from rlhf_operator.api_client.resources import CORE_RESOURCES

PODS = CORE_RESOURCES["Pod"]


class RecordingConsumer:
    """Records its input, and the objects that exist according to it."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        self.events: list[str | None] = []
        self.listings = 0

    def take(self, event: Mapping[str, Any]) -> None:
        meta = event["object"]["metadata"]
        self.events.append(event["type"])
        if event["type"] == "DELETED":
            self.pods.pop(meta["name"], None)
        else:
            self.pods[meta["name"]] = meta["resourceVersion"]

    def listed(self) -> None:
        self.listings += 1

    def alive(self) -> None:
        pass


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "labels": {names.LABEL_JOB_NAME: "job"} | labels}}


@contextlib.asynccontextmanager
async def reflected(server: FakeApiServer) -> AsyncIterator[RecordingConsumer]:
    consumer, client = RecordingConsumer(), server.client()
    running = asyncio.create_task(
        Reflector(client.transport, PODS, None, consumer, names.LABEL_JOB_NAME, lambda: 0.0).run()
    )
    try:
        yield consumer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a back-off of milliseconds, and pages of two."""
    monkeypatch.setattr(reflector_module, "FIRST_BACK_OFF_SECONDS", 0.01)
    monkeypatch.setattr(reflector_module, "LAST_BACK_OFF_SECONDS", 0.02)
    monkeypatch.setattr(reflector_module, "PAGE", 2)


async def test_what_exists_is_listed_in_pages_and_then_what_happens_is_heard() -> None:
    async with FakeApiServer() as server:
        for number in range(5):
            server.put("Pod", pod(f"p{number}"))
        server.put("Pod", {"metadata": {"namespace": "team", "name": "strange"}})
        async with reflected(server) as consumer:
            await until(lambda: consumer.listings == 1)
            assert consumer.events == [None] * 5, "those without the label are not asked for"
            server.put("Pod", pod("p1", more="yes"))
            server.drop("Pod", "team", "p2")
            await until(lambda: consumer.events[5:] == ["MODIFIED", "DELETED"])
        assert sorted(consumer.pods) == ["p0", "p1", "p3", "p4"]


async def test_a_stream_that_ends_is_gone_on_with_and_nothing_is_listed_again() -> None:
    async with FakeApiServer() as server:
        server.put("Pod", pod("p"))
        async with reflected(server) as consumer:
            await until(lambda: consumer.listings == 1 and server.streams > 0)
            server.end_watches()
            server.put("Pod", pod("q"))
            await until(lambda: "q" in consumer.pods)
            assert (consumer.listings, consumer.events) == (1, [None, "ADDED"])


async def test_a_version_that_the_api_server_no_longer_knows_is_followed_by_a_listing() -> None:
    async with FakeApiServer() as server:
        server.put("Pod", pod("p"))
        async with reflected(server) as consumer:
            await until(lambda: consumer.listings == 1 and server.streams > 0)
            server.refuse_watches = True
            server.end_watches()
            server.put("Pod", pod("q"))
            server.drop("Pod", "team", "p")
            server.compact()
            server.refuse_watches = False
            await until(lambda: consumer.listings == 2)
            assert "q" in consumer.pods
            server.put("Pod", pod("r"))
            await until(lambda: "r" in consumer.pods)


@pytest.mark.parametrize("code", [403, 404, 429, 500, 503])
async def test_a_listing_that_fails_is_tried_until_it_does_not(code: int) -> None:
    async with FakeApiServer() as server:
        server.put("Pod", pod("p"))
        server.fail("GET", "/pods", code, times=3)
        async with reflected(server) as consumer:
            await until(lambda: "p" in consumer.pods)
            assert len(server.requests) >= 4


async def test_an_error_in_a_stream_is_followed_by_a_listing() -> None:
    async with FakeApiServer() as server:
        server.put("Pod", pod("p"))
        async with reflected(server) as consumer:
            await until(lambda: consumer.listings == 1 and server.streams > 0)
            server.tell_watches({"type": "ERROR", "object": {"code": 500, "message": "etcdserver: no leader"}})
            await until(lambda: consumer.listings == 2)


async def test_a_line_that_cannot_be_read_costs_a_listing_and_no_more() -> None:
    async with FakeApiServer() as server:
        server.put("Pod", pod("p"))
        async with reflected(server) as consumer:
            await until(lambda: consumer.listings == 1 and server.streams > 0)
            server.tell_watches(b'{"type": "MODIFIED", "obj\n')
            await until(lambda: consumer.listings == 2)


def test_back_off_doubles_to_a_limit_and_is_never_the_same_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    delays = []
    for jitter in (0.0, 1.0):
        reflector = Reflector(None, PODS, None, RecordingConsumer(), jitter=lambda jitter=jitter: jitter)  # type: ignore[arg-type, misc]
        for failures in (1, 2, 3, 50):
            reflector._failures = failures
            delays.append(reflector.back_off())
    assert delays == [0.25, 0.5, 1.0, LAST_BACK_OFF_SECONDS / 2, 0.5, 1.0, 2.0, LAST_BACK_OFF_SECONDS]
