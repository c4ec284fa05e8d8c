"""A running job without events costs no read of the API server and no reconcile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import grpc
import pytest
from tests.support.coordinator.partial_services import PartialCoordinator
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import add_CoordinatorServicer_to_server
from rlhf_operator import coordinator_client, job_certificates
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.certificates import Certificates, new_authority
from rlhf_operator.coordinator_client import Coordinators, reading_of
from rlhf_operator.job_certificates import JobCertificates
from rlhf_operator.manifests.configuration import secret
from rlhf_operator.reconcile.parsed_job import parse_job

NOW = datetime(2026, 11, 28, 12, 0, 0, tzinfo=UTC)
KEY = "team/job"


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    now = datetime.now(UTC)
    return new_authority("job", now).issue([], now)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 a server of another library signals nothing
            await asyncio.sleep(0.01)


def test_a_job_at_work_needs_no_reconcile_while_nothing_happens() -> None:
    cluster = SimulatedCluster().begin()
    cluster.later(11)
    cluster.settle()
    wait = cluster.plan().requeue_after
    assert wait is None or wait > 3600


def test_a_job_whose_coordinator_cannot_be_read_needs_none_either() -> None:
    cluster = SimulatedCluster().begin()
    cluster.reading = None
    cluster.later(11)
    cluster.settle()
    wait = cluster.plan().requeue_after
    assert wait is None or wait > 3600


def test_a_reading_is_news_when_it_says_something_else() -> None:
    said: dict[str, Any] = {"phase": "Generating", "iteration": 3, "iterations": 9, "seconds_left": 90.0}
    first = reading_of(pb.JobStatus(**said, waiting_for=["generation-0 to decode (3 s)"]), NOW)
    said["seconds_left"] = 81.0
    later = NOW + timedelta(seconds=9)
    again = reading_of(pb.JobStatus(**said, waiting_for=["generation-0 to decode (12 s)"]), later)
    assert not first.says_else(again)
    assert first.says_else(reading_of(pb.JobStatus(**said | {"iteration": 4}), later))
    lost = [pb.WorkerStatus(worker="generation-0", state="Lost", silent_seconds=40.0)]
    assert first.says_else(reading_of(pb.JobStatus(**said, workers=lost), later))
    waits = [reading_of(pb.JobStatus(phase="Starting", waiting_for=[text]), NOW) for text in ("a", "b")]
    assert waits[0].says_else(waits[1])


class Stored:
    """An API server with one Secret, which counts its reads."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body: dict[str, Any] | None = body
        self.reads = 0

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.reads += 1
        return self.body


async def test_the_secret_is_read_again_when_it_is_needed_alone(certificates: Certificates) -> None:
    cluster = SimulatedCluster()
    job = parse_job(cluster.job).job
    assert job is not None
    stored = Stored(secret(job, certificates.data()))
    remembered = JobCertificates(cast(KubernetesClient, stored))
    for minute in range(120):
        assert await remembered.current(KEY, "job-uid", NOW + timedelta(minutes=minute), needed=False)
    assert stored.reads == 1
    now = NOW + timedelta(seconds=job_certificates.REREAD_INTERVAL.total_seconds() - 1)
    # A pod starts: what was read a moment ago is read again as soon as it may be, and the end of the start is no end.
    assert await remembered.current(KEY, "job-uid", now, needed=True)
    assert (stored.reads, remembered.seconds_to_reread(KEY, now)) == (1, 1.0)
    stored.body = None
    assert await remembered.current(KEY, "job-uid", now + timedelta(seconds=1), needed=False) is None
    assert (stored.reads, remembered.seconds_to_reread(KEY, now)) == (2, None)


class AnsweringCoordinator(PartialCoordinator):
    """A coordinator with configured answers."""

    def __init__(self) -> None:
        self.status = pb.JobStatus(phase="Generating", iteration=1, iterations=9)
        self.asked = 0

    async def GetStatus(self, request: Any, context: Any) -> pb.JobStatus:  # noqa: N802 gRPC names it
        self.asked += 1
        self.status.seconds_left = 1000.0 - self.asked
        return self.status

    async def Resize(self, request: Any, context: Any) -> pb.ResizeReply:  # noqa: N802 gRPC names it
        self.status.replicas.update(request.replicas)
        return pb.ResizeReply()


@asynccontextmanager
async def answering(
    certificates: Certificates, changed: list[str]
) -> AsyncIterator[tuple[AnsweringCoordinator, Coordinators]]:
    """Yield a served coordinator and its reader, which notes the jobs with news in `changed`."""
    served, server = AnsweringCoordinator(), grpc.aio.server()
    add_CoordinatorServicer_to_server(served, server)
    keys = [(certificates.key, certificates.certificate)]
    credentials = grpc.ssl_server_credentials(keys, certificates.authority, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    coordinators = Coordinators(changed.append, port)
    try:
        yield served, coordinators
    finally:
        await coordinators.close()
        await server.stop(None)


async def test_answers_that_say_the_same_are_no_news(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "READ_EVERY_SECONDS", 0.01)
    changed: list[str] = []
    async with answering(certificates, changed) as (served, coordinators):
        coordinators.refresh(KEY, "127.0.0.1", certificates)
        await until(lambda: served.asked >= 5)
        assert changed == [KEY]
        reading, _ = coordinators.latest(KEY)
        asked = served.asked
        await until(lambda: served.asked >= asked + 3)
        newer, _ = coordinators.latest(KEY)
        assert reading is not None
        assert newer is not None
        assert newer.at > reading.at, "what says the same is newer all the same"
        served.status.iteration = 2
        await until(lambda: len(changed) == 2)
        # Whatever is in flight, sizes reach it.
        coordinators.resize(KEY, {"generation": 5})
        await until(lambda: len(changed) == 3)
        resized, _ = coordinators.latest(KEY)
        assert resized is not None
        assert resized.replicas["generation"] == 5


async def test_each_reading_has_the_run_of_the_coordinator_that_answered(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "READ_EVERY_SECONDS", 60.0)
    changed: list[str] = []
    async with answering(certificates, changed) as (_, coordinators):

        def last_run() -> str:
            reading, _ = coordinators.latest(KEY)
            return reading.run_id if reading is not None else ""

        coordinators.refresh(KEY, "127.0.0.1", certificates, "uid-1/")
        await until(lambda: changed == [KEY])
        assert last_run() == "uid-1/"
        coordinators.refresh(KEY, "127.0.0.1", certificates, "uid-1/ended")  # the same address answers for another run
        assert last_run() == "uid-1/"
        await until(lambda: changed == [KEY, KEY])
        assert last_run() == "uid-1/ended"
        coordinators.refresh(KEY, "127.0.0.2", certificates, "uid-2/")
        assert last_run() == "uid-1/ended", "the last answer stays until the new coordinator answers"


async def test_a_coordinator_that_does_not_answer_is_not_dialled_between_attempts(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "READ_EVERY_SECONDS", 60.0)
    dialled: list[object] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(0)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    changed: list[str] = []
    coordinators = Coordinators(changed.append, server.sockets[0].getsockname()[1])
    try:
        coordinators.refresh(KEY, "127.0.0.1", certificates)
        await until(lambda: bool(changed))
        await asyncio.sleep(0.2)
        before = len(dialled)
        await asyncio.sleep(3)
        assert len(dialled) == before, "a channel that is left open connects again every second"
    finally:
        await coordinators.close()
        server.close()
