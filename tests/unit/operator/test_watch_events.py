"""Effects of an event: the index is updated, and a changed job is queued."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.support.operator.fake_api_server import FakeApiServer, until
from tests.support.operator.recording_queue import RecordingQueue

from rlhf_common import names
from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.watch_events import WATCHED, ResourceConsumer, WatchEventHandler
from rlhf_operator.watches import JobWatch

Json = dict[str, Any]


def job(version: int = 1) -> Json:
    meta = {"namespace": "team", "name": "job", "uid": "j", "resourceVersion": str(version)}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta, "spec": {}}


def pod(version: int, phase: str = "Pending", **status: Any) -> Json:
    labels = {names.LABEL_JOB_NAME: "job", names.LABEL_GROUP: "training"}
    meta = {"namespace": "team", "name": "job-training-0", "uid": "p", "resourceVersion": str(version)}
    labels[names.LABEL_INDEX] = "0"
    owners = [{"controller": True, "uid": "j"}]
    return {"metadata": meta | {"labels": labels, "ownerReferences": owners}, "status": {"phase": phase, **status}}


@pytest.fixture
def queue() -> RecordingQueue:
    return RecordingQueue()


@pytest.fixture
def index() -> Index:
    return Index()


def event_handler(index: Index, queue: Any, first_listings: int = 0) -> WatchEventHandler:
    return WatchEventHandler(index, queue, OperatorMetrics(), first_listings)


def test_no_job_gets_a_turn_before_everything_is_listed(index: Index, queue: RecordingQueue) -> None:
    handler = event_handler(index, queue, 2)
    handler.take(names.KIND, {"type": None, "object": job()})
    handler.first_listed()
    handler.take(names.KIND, {"type": "MODIFIED", "object": job(2)})
    handler.take("Pod", {"type": None, "object": pod(3)})
    assert queue.taken() == []
    handler.first_listed()
    assert queue.taken() == ["team/job"]
    assert list(index.pods("team/job", "j")[0]) == ["job-training-0"]


def test_an_event_with_news_asks_for_a_turn_and_one_without_for_none(index: Index, queue: RecordingQueue) -> None:
    handler = event_handler(index, queue)
    handler.take("Pod", {"type": "ADDED", "object": pod(1)})
    assert queue.taken() == ["team/job"]
    handler.take("Pod", {"type": "MODIFIED", "object": pod(2, hostIP="10.0.0.1")})
    assert queue.taken() == []
    handler.take("Pod", {"type": "MODIFIED", "object": pod(3, "Running")})
    assert queue.taken() == ["team/job"]
    handler.take("Pod", {"type": "MODIFIED", "object": pod(2, hostIP="10.0.0.1")})
    assert queue.taken() == []
    assert index.pods("team/job", "j")[0]["job-training-0"].version == 3


def test_a_deletion_asks_for_a_turn(index: Index, queue: RecordingQueue) -> None:
    handler = event_handler(index, queue)
    handler.take("Pod", {"type": "ADDED", "object": pod(1)})
    queue.taken()
    handler.take("Pod", {"type": "DELETED", "object": pod(2)})
    assert queue.taken() == ["team/job"]
    assert index.pods("team/job", "j")[0] == {}


def test_what_belongs_to_no_job_is_left_alone(index: Index, queue: RecordingQueue) -> None:
    body = pod(1)
    del body["metadata"]["labels"]
    event_handler(index, queue).take("Pod", {"type": "ADDED", "object": body})
    assert queue.taken() == []


def test_a_version_without_news_is_known_as_the_newest(index: Index, queue: RecordingQueue) -> None:
    handler = event_handler(index, queue)
    for version in (1, 5):
        handler.take("Pod", {"type": "MODIFIED", "object": pod(version)})
    assert index.stored_versions("Pod")["p"][2] == 5


def test_a_listing_that_names_a_job_again_was_begun_anew(index: Index, queue: RecordingQueue) -> None:
    relists: list[str] = []
    metrics = OperatorMetrics()
    handler = WatchEventHandler(index, queue, metrics, on_relist=lambda: relists.append("anew"))  # type: ignore[arg-type]
    watch = JobWatch(handler, metrics, ())
    watch.take({"type": None, "object": job()})
    watch.take({"type": "MODIFIED", "object": job(2)})
    assert relists == []
    watch.take({"type": None, "object": job(3)})
    assert relists == ["anew"]
    assert queue.taken() == ["team/job"] * 3


def test_a_second_listing_of_a_reflector_is_no_first_one(index: Index, queue: RecordingQueue) -> None:
    relists: list[str] = []
    metrics = OperatorMetrics()
    handler = WatchEventHandler(index, queue, metrics, 1, lambda: relists.append("anew"))  # type: ignore[arg-type]
    consumer = ResourceConsumer(handler, metrics, "Pod", WATCHED["Pod"])
    consumer.take({"type": None, "object": pod(1)})
    assert queue.taken() == []
    consumer.listed()
    assert (queue.taken(), relists) == (["team/job"], [])
    consumer.listed()
    assert relists == ["anew"]
    assert metrics.registry.get_sample_value("rlhf_operator_watch_relists_total", {"resource": "pods"}) == 1


def test_a_watch_is_alive_from_its_first_listing_on_and_says_nothing_before(
    index: Index, queue: RecordingQueue
) -> None:
    metrics = OperatorMetrics()
    handler = WatchEventHandler(index, queue, metrics)  # type: ignore[arg-type]
    consumer = ResourceConsumer(handler, metrics, "Pod", WATCHED["Pod"])
    name, labels = "rlhf_operator_watch_alive_timestamp_seconds", {"resource": "pods"}
    assert metrics.registry.get_sample_value(name, labels) is None
    before = time.time()
    consumer.listed()
    alive = metrics.registry.get_sample_value(name, labels)
    assert alive is not None
    assert alive >= before


async def test_kopf_watches_jobs_by_its_public_interface_and_writes_nothing() -> None:
    async with FakeApiServer() as server:
        server.put(names.KIND, job(5) | {"apiVersion": names.API_VERSION, "kind": names.KIND})
        index, queue, metrics = Index(), RecordingQueue(), OperatorMetrics()
        handler = WatchEventHandler(index, queue, metrics)  # type: ignore[arg-type]
        with server.kubeconfig() as path, pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(path))
            patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
            running = asyncio.create_task(JobWatch(handler, metrics, ()).run(served))
            await until(lambda: index.version("team/job") == 101)
            server.put(names.KIND, job(6) | {"apiVersion": names.API_VERSION, "kind": names.KIND})
            await until(lambda: index.version("team/job") == 102)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert {method for method, _ in server.requests} == {"GET"}


async def served() -> None:
    """Return immediately: RLHFJobs are served."""
