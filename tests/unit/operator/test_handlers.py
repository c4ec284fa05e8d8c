"""What an event leads to: the index is brought up to date, and a job gets a turn when there is news for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kopf._cogs.clients.watching import Bookmark, WatchingError

from rlhf_api import names
from rlhf_operator import handlers
from rlhf_operator.handlers import Intake
from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics

Json = dict[str, Any]


class Asked:
    """A work queue's intake."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, key: str) -> None:
        self.keys.append(key)

    def taken(self) -> list[str]:
        found, self.keys = self.keys, []
        return found


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
def queue() -> Asked:
    return Asked()


@pytest.fixture
def index() -> Index:
    return Index()


def intake(index: Index, queue: Any, streams: int = 0) -> Intake:
    return Intake(index, queue, OperatorMetrics(), streams=streams)


def test_no_job_gets_a_turn_before_everything_is_listed(index: Index, queue: Asked) -> None:
    found = intake(index, queue, streams=2)
    found.take(names.KIND, {"type": None, "object": job()})
    found.listed()
    found.take(names.KIND, {"type": "MODIFIED", "object": job(2)})
    found.take("Pod", {"type": None, "object": pod(3)})
    assert queue.taken() == []
    found.listed()
    assert queue.taken() == ["team/job"]
    assert list(index.pods("team/job", "j")[0]) == ["job-training-0"]


def test_an_event_with_news_asks_for_a_turn_and_one_without_for_none(index: Index, queue: Asked) -> None:
    found = intake(index, queue)
    found.take("Pod", {"type": "ADDED", "object": pod(1)})
    assert queue.taken() == ["team/job"]
    found.take("Pod", {"type": "MODIFIED", "object": pod(2, hostIP="10.0.0.1")})
    assert queue.taken() == []
    found.take("Pod", {"type": "MODIFIED", "object": pod(3, "Running")})
    assert queue.taken() == ["team/job"]
    found.take("Pod", {"type": "MODIFIED", "object": pod(2, hostIP="10.0.0.1")})
    assert queue.taken() == []
    assert index.pods("team/job", "j")[0]["job-training-0"].version == 3


def test_a_deletion_asks_for_a_turn(index: Index, queue: Asked) -> None:
    found = intake(index, queue)
    found.take("Pod", {"type": "ADDED", "object": pod(1)})
    queue.taken()
    found.take("Pod", {"type": "DELETED", "object": pod(2)})
    assert queue.taken() == ["team/job"]
    assert index.pods("team/job", "j")[0] == {}


def test_what_belongs_to_no_job_is_left_alone(index: Index, queue: Asked) -> None:
    body = pod(1)
    del body["metadata"]["labels"]
    intake(index, queue).take("Pod", {"type": "ADDED", "object": body})
    assert queue.taken() == []


def test_a_version_without_news_is_known_as_the_newest(index: Index, queue: Asked) -> None:
    found = intake(index, queue)
    for version in (1, 5):
        found.take("Pod", {"type": "MODIFIED", "object": pod(version)})
    assert index.known("Pod")["p"][2] == 5


def test_a_stream_that_breaks_is_opened_again_and_its_second_listing_is_no_first_one(
    index: Index, queue: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, told = 0, asyncio.Event()

    async def streams(**_: Any) -> AsyncIterator[Any]:
        nonlocal opened
        opened += 1
        yield {"type": None, "object": pod(opened)}
        yield Bookmark.LISTED
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
        if opened == 1:
            raise WatchingError("etcd is away")
        yield {"type": "MODIFIED", "object": pod(10, "Running")}
        told.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(handlers, "infinite_watch", streams)
    monkeypatch.setattr(handlers, "AGAIN_SECONDS", 0.0)
    # The stream of jobs is not listed yet, so nobody gets a turn.
    found = intake(index, queue, streams=2)

    async def run() -> None:
        place = handlers.WATCHED["Pod"]
        running = asyncio.create_task(handlers._stream(handlers.settings(), "Pod", place, None, found))
        await told.wait()
        running.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert (opened, queue.taken()) == (2, [])
    assert index.pods("team/job", "j")[0]["job-training-0"].phase == "Running"
    found.listed()
    assert queue.taken() == ["team/job"]
