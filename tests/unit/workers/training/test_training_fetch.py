"""Fetching a batch: complete over several parts, retried after a broken connection; a rejection is passed on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.coordinator.partial_services import PartialCoordinator
from tests.support.loopback import free_port
from tests.support.training.training_ranks import make_samples

from rlhf_common import channels, control_pb2_grpc
from rlhf_common import control_pb2 as pb
from rlhf_operator.certificates import new_authority
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.coordinator_batches import CoordinatorBatches


class FailingCoordinator(PartialCoordinator):
    """Breaks the first stream, then serves iteration 0, and rejects every other one."""

    def __init__(self) -> None:
        self.calls = 0

    def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> Iterator[pb.BatchPart]:  # noqa: N802
        self.calls += 1
        if request.iteration != 0:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "iteration 3 is not complete: 2 of 8 samples scored")
        samples = make_samples()
        yield pb.BatchPart(samples=samples[:5], total=8)
        if self.calls == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        yield pb.BatchPart(samples=samples[5:], total=8)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    control_pb2_grpc.add_CoordinatorServicer_to_server(FailingCoordinator(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_broken_stream_is_fetched_again_from_its_start(address: str) -> None:
    source = CoordinatorBatches(address, "training-0", None, timeout=120.0)
    slept: list[float] = []
    samples = source.fetch(0, sleep=slept.append)
    assert [sample.sample for sample in samples] == list(range(8))
    assert len(slept) == 1


def test_a_coordinator_that_came_back_with_renewed_certificates_is_met(tmp_path: Path) -> None:
    """The old certificate counts as expired: another authority issued it."""
    source, port = None, free_port()
    for _ in range(2):
        now = datetime.now(UTC)
        new_authority("job", now).issue([], now).write(tmp_path)
        server = grpc.server(ThreadPoolExecutor(2))
        control_pb2_grpc.add_CoordinatorServicer_to_server(FailingCoordinator(), server)
        assert port == server.add_secure_port(f"127.0.0.1:{port}", channels.server_credentials(tmp_path))
        server.start()
        source = source or CoordinatorBatches(f"127.0.0.1:{port}", "training-0", tmp_path, timeout=120.0)
        assert len(source.fetch(0)) == 8
        server.stop(None).wait()


def test_a_refusal_is_passed_on(address: str) -> None:
    source = CoordinatorBatches(address, "training-0", None, timeout=120.0)
    with pytest.raises(WorkError, match="batch of iteration 3: FAILED_PRECONDITION: iteration 3 is not complete") as no:
        source.fetch(3)
    assert no.value.failure.reason == "BatchRefused"


def test_an_absent_coordinator_is_waited_for_and_then_named() -> None:
    source = CoordinatorBatches("127.0.0.1:1", "training-0", None, timeout=1.0)
    expected = r"waited 1 s for the coordinator at 127\.0\.0\.1:1 to give the batch of iteration 4"
    with pytest.raises(WorkError, match=expected):
        source.fetch(4)
