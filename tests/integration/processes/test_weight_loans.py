"""Weights in memory of another process: the same bits as in a stream, and never a mix of versions.

The lender is a real process, which these tests kill and switch to another version at the worst times.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.workers.weight_lender import HOST, ROOT, Lender, VersionedWeights, weights_of

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.peer_server import start_server
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.shared_memory.host_regions import HostSharing
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.fetching import FetchedWeights, FetchPolicy, fetch_weights
from rlhf_workers.weights.source import WeightSourceService

pytestmark = pytest.mark.full

PATIENT = FetchPolicy(attempts=2, backoff_seconds=0.01, describe_seconds=60.0, idle_seconds=60.0)
WAIT_SECONDS = 120.0
READER = """
import sys, time
from tests.support.workers.weight_lender import HOST
from rlhf_common.control_pb2 import WeightLocation
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.weights.fetching import fetch_weights
with fetch_weights("actor", 9, [WeightLocation(address=sys.argv[1])], None, lent_by(HOST)) as weights:
    print(weights.ways, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def lender() -> Iterator[Lender]:
    process = Lender()
    yield process
    process.close()


@pytest.fixture
def mortal() -> Iterator[Lender]:
    process = Lender()
    yield process
    process.close()


@contextmanager
def borrowed(lender: Lender, version: int) -> Iterator[FetchedWeights]:
    with fetch_weights("actor", version, [lender.location], None, lent_by(HOST), PATIENT) as weights:
        yield weights


def same(weights: FetchedWeights, version: int) -> bool:
    wanted = weights_of(version)
    return weights.tensors.keys() == wanted.keys() and all(
        tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape and torch.equal(tensor, wanted[name])
        for name, tensor in weights.tensors.items()
    )


def until(condition: Callable[[], bool], event: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{event} within {WAIT_SECONDS:g} s"
        time.sleep(0.01)


def test_borrowed_weights_are_those_of_a_stream_bit_by_bit(lender: Lender) -> None:
    lender.hold(1)
    with borrowed(lender, 1) as weights:
        assert weights.bytes_by_way.keys() == {"host_memory"}
        assert same(weights, 1)
        weights.confirm()
    with fetch_weights("actor", 1, [lender.location], None, (), PATIENT) as streamed:
        assert streamed.bytes_by_way.keys() == {"stream"}
        assert same(streamed, 1)


def test_versions_follow_each_other_in_the_same_memory(lender: Lender) -> None:
    for version in (2, 3, 4):
        lender.hold(version)
        for _ in range(2):
            with borrowed(lender, version) as weights:
                assert same(weights, version)
        until(lambda: lender.regions() == 1, "one region is left")


def test_what_is_read_stays_as_it_is_while_the_lender_goes_on(lender: Lender) -> None:
    lender.hold(5)
    with borrowed(lender, 5) as before:
        lender.hold(6)
        with borrowed(lender, 6) as after:
            assert same(after, 6)
            assert same(before, 5)
    until(lambda: lender.regions() == 1, "the memory of the version before is freed")


def test_another_version_is_refused_as_by_a_stream(lender: Lender) -> None:
    lender.hold(7)
    with pytest.raises(WorkError, match=r"holds actor version 7") as caught, borrowed(lender, 8):
        pass
    assert caught.value.failure.retryable


def test_weights_stay_readable_when_the_lender_is_killed_mid_way(mortal: Lender) -> None:
    with borrowed(mortal, 1) as weights:
        mortal.process.send_signal(signal.SIGKILL)
        mortal.process.wait()
        assert same(weights, 1)
        weights.confirm()


def test_a_reader_that_is_killed_leaves_no_memory_behind(lender: Lender) -> None:
    lender.hold(9)
    command = [sys.executable, "-c", READER, lender.location.address]
    reader = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "host_memory\n"
    reader.kill()
    reader.wait()
    reader.stdout.close()
    until(lambda: lender.regions() == 0, "memory whose reader did not say that it has read is freed")
    with borrowed(lender, 9) as weights:
        assert same(weights, 9)


class Spoiling(WeightSourceService):
    """Lends weights that differ from their description."""

    def __init__(self, fault: str, copies: WeightCopies | None) -> None:
        provider = VersionedWeights(1)
        super().__init__(lambda: provider, copies)
        self.fault = fault

    async def Lend(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802
        async for loan in super().Lend(request_iterator, context):
            FAULTS[self.fault](loan)
            yield loan


def change(message: Any, field: str, value: Any) -> None:
    """Set a field of a message."""
    setattr(message, field, value)


FAULTS: dict[str, Callable[[pb.WeightLoan], Any]] = {
    "checksum": lambda loan: change(loan.manifest.tensors[0], "sums_crc32", 1),
    "name twice": lambda loan: change(loan.manifest.tensors[1], "name", "matrix"),
    "type": lambda loan: change(loan.manifest.tensors[0], "dtype", "OBJECT"),
    "negative side": lambda loan: loan.manifest.tensors[0].shape.insert(0, -1),
    "beyond the end": lambda loan: change(loan.manifest.tensors[-1], "offset", 1 << 40),
    "over another": lambda loan: change(loan.manifest.tensors[1], "offset", 0),
    "unaligned": lambda loan: change(loan.manifest.tensors[-1], "offset", loan.memory.size - 11),
    "size": lambda loan: change(loan.memory, "size", loan.memory.size + 4096),
    "inode": lambda loan: change(loan.memory.host, "inode", 1),
    "descriptor": lambda loan: change(loan.memory.host, "descriptor", 1 << 20),
    "process": lambda loan: change(loan.memory, "pid", 1 << 30),
    "host": lambda loan: change(loan.memory.place, "host", "another"),
    "kind": lambda loan: loan.memory.ClearField("host"),
    "version": lambda loan: change(loan.manifest, "version", 2),
    "nothing is lent": lambda loan: None,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_loan_that_is_not_what_it_says_is_streamed_instead(fault: str) -> None:
    copies = None if fault == "nothing is lent" else WeightCopies([HostSharing()])  # not that of this process
    server = await start_server("127.0.0.1:0", None, Spoiling(fault, copies))
    location = pb.WeightLocation(address=f"127.0.0.1:{server.port}")

    def read() -> None:
        with fetch_weights("actor", 1, [location], None, lent_by(HOST), PATIENT) as weights:
            assert weights.bytes_by_way.keys() == {"stream"}
            assert same(weights, 1)

    try:
        await asyncio.to_thread(read)
    finally:
        await server.stop()
        if copies is not None:
            copies.close()


async def test_a_worker_borrows_from_itself() -> None:
    provider = VersionedWeights(1)
    server = await start_server("127.0.0.1:0", None, WeightSourceService(lambda: provider, WeightCopies(lent_by(HOST))))
    location = pb.WeightLocation(address=f"127.0.0.1:{server.port}")

    def read() -> None:
        with fetch_weights("actor", 1, [location], None, lent_by(HOST), PATIENT) as weights:
            assert weights.bytes_by_way.keys() == {"host_memory"}
            assert same(weights, 1)

    try:
        await asyncio.to_thread(read)
    finally:
        await server.stop()
