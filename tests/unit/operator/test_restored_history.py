"""After a restore of etcd versions go back: a comparison detects it, and nothing else looks like it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.operator.indexed_bodies import KEY, job, other, phase, pod
from tests.support.operator.recording_queue import RecordingQueue

from rlhf_operator import resync
from rlhf_operator.api_client.errors import UnavailableError
from rlhf_operator.index import Index
from rlhf_operator.resync import RestoredError, Resync


class Listing:
    """Objects of the API server by kind, in place of its client; `version` is etcd's."""

    def __init__(self, version: int, **listed: list[dict[str, Any]]) -> None:
        self.version, self.listed = version, listed
        self.meanwhile: Callable[[], object] = lambda: None
        """Called while pods are listed."""

    async def metadata(
        self, kind: str, place: str | None, labels: str, on_version: Callable[[int], object]
    ) -> AsyncIterator[dict[str, Any]]:
        on_version(self.version)
        for item in self.listed.get(kind, ()):
            yield item["metadata"]
        if kind == "Pod":
            self.meanwhile()

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return next((item for item in self.listed.get(kind, ()) if item["metadata"]["name"] == name), None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all waits."""
    monkeypatch.setattr(resync, "ECHO_SECONDS", 0.0)
    monkeypatch.setattr(resync, "SOON_SECONDS", 0.0)


def comparing(index: Index, listing: Listing) -> Resync:
    return Resync(listing, index, RecordingQueue(), ())  # type: ignore[arg-type]


def remembered() -> Index:
    index = Index()
    index.put_job(job(90))
    index.put_pod(KEY, pod(80))
    index.put_other(KEY, "Service", other(70))
    return index


def listing_of(job_at: int = 90, pod_at: int = 80) -> dict[str, Any]:
    return {"RLHFJob": [job(job_at)], "Pod": [pod(pod_at)], "Service": [{"metadata": other(70)}]}


def test_a_listing_that_is_older_than_what_is_known_is_of_another_history() -> None:
    with pytest.raises(RestoredError, match="rlhfjobs are older than before: etcd was restored"):
        asyncio.run(comparing(remembered(), Listing(50)).compare())


def test_an_object_that_is_older_is_one_too_where_a_restore_raised_the_version_itself() -> None:
    with pytest.raises(RestoredError, match="pods are older"):
        asyncio.run(comparing(remembered(), Listing(1_000_000, **listing_of(pod_at=60))).compare())


def test_a_listing_that_is_older_than_the_last_is_one_though_all_objects_are_as_they_were() -> None:
    listing = Listing(500, **listing_of())
    result = comparing(remembered(), listing)
    asyncio.run(result.compare())
    listing.version = 400
    with pytest.raises(RestoredError):
        asyncio.run(result.compare())


def test_what_is_written_while_it_is_listed_is_no_restore() -> None:
    index = remembered()
    listing = Listing(100, **listing_of())

    def meanwhile() -> None:
        index.put_pod(KEY, pod(110, phase="Failed"))
        index.put_job(job(111))
        listing.version = 120

    listing.meanwhile = meanwhile
    asyncio.run(comparing(index, listing).compare())
    assert phase(index) == "Failed"
    assert index.version(KEY) == 111


def test_what_was_gone_and_is_back_is_read_anew_and_is_no_restore() -> None:
    index = remembered()
    # As for a watch that selects by labels, when somebody takes ours off.
    index.drop_pod(KEY, "job-generation-0", "p1")
    index.drop_other(KEY, "Service", "job", "s1")
    result = comparing(index, Listing(100, **listing_of(pod_at=95)))
    asyncio.run(result.compare())
    assert phase(index) == "Running"
    assert index.applied(KEY, "u1")
    assert result.silent_rounds == 0


def test_a_request_without_an_answer_is_followed_by_a_comparison_as_soon_as_one_can_be_made() -> None:
    listing = Listing(50)
    result = comparing(remembered(), listing)
    answers = iter([UnavailableError("down")])

    async def compared() -> None:
        result.soon()
        try:
            raise next(answers)
        except StopIteration:
            await Resync.compare(result)

    result.compare = compared  # type: ignore[method-assign]
    result.soon()
    with pytest.raises(RestoredError):
        asyncio.run(asyncio.wait_for(result.run(), 60))
