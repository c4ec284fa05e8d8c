"""If the RLHFJob definition is missing, at the start or later, the operator waits, reports it, and continues."""

import asyncio
import logging
import socket

import aiohttp
import pytest
from tests.support.operator.fake_api_server import FakeApiServer, until
from tests.support.operator.recording_queue import RecordingQueue
from tests.support.operator.simulated_cluster import stored_job

from rlhf_common import names
from rlhf_operator import definition as definition_module
from rlhf_operator import health, operator_logs, watches
from rlhf_operator.definition import Definition
from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.watch_events import WatchEventHandler
from rlhf_operator.watches import JobWatch
from rlhf_operator.workqueue import QueueSnapshot

ALWAYS = 10**9
MISSING = "rlhfjobs.rlhf.dev is not installed: the operator waits for it (kubectl apply --server-side -f crds/rlhfjobs"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(definition_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(watches, "RETRY_SECONDS", 0.1)


async def test_an_operator_that_is_started_first_waits_for_the_definition_with_one_line_of_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeApiServer() as server:
        server.fail("GET", "/rlhfjobs", 404, times=ALWAYS)
        client = server.client()
        definition = Definition(client, ())
        with caplog.at_level(logging.INFO):
            waits = asyncio.create_task(definition.served())
            await until(lambda: len(server.requests) > 8)
            assert definition.problem.startswith(MISSING)
            assert not waits.done()
            server.failures.clear()
            await asyncio.wait_for(waits, 30)
        assert definition.problem == ""
        assert [record.message[:40] for record in caplog.records] == [MISSING[:40], "RLHFJobs are served"]
        await client.close()


async def test_readiness_says_what_the_operator_waits_for_and_liveness_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    problem = MISSING
    idle = QueueSnapshot(0, 0, 0.0, 0.0)
    served = await health.serve([f"127.0.0.1:{port}"], lambda: idle, lambda: 0, OperatorMetrics(), lambda: problem)
    try:
        async with aiohttp.ClientSession() as client:
            for said, code, text in ((MISSING, 503, MISSING), ("", 200, "ok")):
                problem = said
                async with client.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    assert (answer.status, await answer.text()) == (code, text)
                async with client.get(f"http://127.0.0.1:{port}/healthz") as answer:
                    assert answer.status == 200
    finally:
        await served.cleanup()


async def test_jobs_are_watched_on_after_their_definition_was_deleted_and_is_there_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """kopf would have ended this process with SIGKILL after 20 s."""
    assert watches.kopf_settings().process.ultimate_exiting_timeout is None
    async with FakeApiServer() as server:
        server.put(names.KIND, stored_job())
        index, metrics, client = Index(), OperatorMetrics(), server.client()
        handler = WatchEventHandler(index, RecordingQueue(), metrics)  # type: ignore[arg-type]
        definition = Definition(client, ())
        with server.kubeconfig() as path:
            monkeypatch.setenv("KUBECONFIG", str(path))
            monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
            running = asyncio.create_task(JobWatch(handler, metrics, ()).run(definition.served))
            await until(lambda: index.job("team/job") is not None)
            server.drop(names.KIND, "team", "job")
            await until(lambda: index.job("team/job") is None)
            server.fail("GET", "/rlhfjobs", 404, times=ALWAYS)
            server.end_watches()
            await until(lambda: definition.problem.startswith(MISSING))
            await asyncio.sleep(0.5)
            before = len(server.requests)
            await asyncio.sleep(0.5)
            assert len(server.requests) - before <= 12, "one request per RETRY_SECONDS"
            server.failures.clear()
            job = stored_job()
            job["metadata"]["uid"] = "another-uid"
            server.put(names.KIND, job)
            await until(lambda: index.job("team/job") is not None)
            assert definition.problem == ""
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await client.close()


def test_the_log_has_no_traceback_of_kopf() -> None:
    record = logging.LogRecord("kopf._core", logging.ERROR, "", 1, "it failed", (), (ValueError, ValueError(), None))
    assert operator_logs._of_kopf(record)
    assert record.exc_info is None
    ours = logging.LogRecord("rlhf_operator", logging.ERROR, "", 1, "a bug", (), (ValueError, ValueError(), None))
    assert operator_logs._of_kopf(ours)
    assert ours.exc_info is not None
