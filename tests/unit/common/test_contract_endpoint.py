"""Answers of a job's process to the kubelet: alive, stuck, starting."""

import asyncio
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import prometheus_client
import pytest
from tests.support.loopback import LOOPBACKS, bracketed

from rlhf_common import endpoint as endpoints
from rlhf_common.endpoint import LIVENESS_PATH, STALE_SECONDS, Endpoint


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def endpoint(clock: Clock) -> Iterator[Endpoint]:
    server = Endpoint("127.0.0.1", 0, clock)
    yield server
    server.close()


def ask(port: int, path: str = LIVENESS_PATH, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_process_that_starts_lives_however_long_that_takes(endpoint: Endpoint, clock: Clock) -> None:
    clock.now = 3600.0
    assert ask(endpoint.port) == (200, "ok\n")
    assert ask(endpoint.port, "/metrics") == (503, "the process is starting and has no metrics yet\n")


@pytest.mark.parametrize("wildcard", ["::", "0.0.0.0"])
def test_a_kubelet_is_answered_by_either_family(wildcard: str) -> None:
    server = Endpoint(wildcard, 0)
    try:
        assert {ask(server.port, host=bracketed(host)) for host in LOOPBACKS} == {(200, "ok\n")}
    finally:
        server.close()


def test_a_loop_that_does_not_turn_is_told_with_the_place_where_it_is(
    endpoint: Endpoint, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.beat()
    clock.now = STALE_SECONDS
    assert ask(endpoint.port)[0] == 200
    clock.now = STALE_SECONDS + 5
    # Asked by another thread, so that this one stands here and not somewhere deep in a library.
    with caplog.at_level(logging.ERROR), ThreadPoolExecutor() as others:
        assert others.submit(ask, endpoint.port).result() == (503, "the event loop has not turned for 35 s\n")
        assert others.submit(ask, endpoint.port).result()[0] == 503
    [record] = [record for record in caplog.records if record.name == "rlhf_common.endpoint"]
    assert "the event loop has not turned for 35 s; where it is:" in record.getMessage()
    assert "test_a_loop_that_does_not_turn" in record.getMessage(), "the stack of the main thread"
    endpoint.beat()
    assert ask(endpoint.port) == (200, "ok\n")


def test_metrics_are_on_every_other_path(endpoint: Endpoint) -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("rlhf_test", "A number.", registry=registry).set(7)
    endpoint.metrics = prometheus_client.make_wsgi_app(registry)
    assert "rlhf_test 7.0" in ask(endpoint.port, "/metrics")[1]
    assert ask(endpoint.port) == (200, "ok\n")


async def test_a_computation_on_another_thread_is_no_hang_and_one_on_the_loop_is(
    endpoint: Endpoint, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    beaten, beat = asyncio.Event(), endpoint.beat

    def beat_and_tell() -> None:
        beat()
        beaten.set()

    monkeypatch.setattr(endpoints, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(endpoint, "beat", beat_and_tell)
    beating, ended = asyncio.create_task(endpoint.keep_beating()), threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(10_000))

    computing = asyncio.create_task(asyncio.to_thread(compute))
    for _ in range(5):
        clock.now += STALE_SECONDS + 1
        beaten.clear()
        await beaten.wait()
        assert not endpoint.stuck_seconds
    ended.set()
    await computing
    clock.now += STALE_SECONDS + 1  # nothing is awaited: the loop is stuck here
    assert ask(endpoint.port)[0] == 503
    beating.cancel()
