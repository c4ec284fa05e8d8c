"""Memory lent with CUDA IPC, through the calls of a driver backed by host memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import torch
from tests.support.workers.stand_in_driver import StandInDeviceMemory, StandInDriver, StandInGpu
from tests.support.workers.weight_lender import VersionedWeights, weights_of

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.peer_server import start_server
from rlhf_workers.shared_memory.cuda_driver import GRANULE, CudaDriver, CudaDriverError
from rlhf_workers.shared_memory.cuda_regions import CudaSharing
from rlhf_workers.shared_memory.host_regions import HostSharing
from rlhf_workers.shared_memory.regions import RegionRefusedError
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.fetching import FetchedWeights, fetch_weights
from rlhf_workers.weights.source import WeightSourceService

WAIT_SECONDS = 120.0
HOST_SHARING = HostSharing()
"""One instance per process, as in a worker."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class GpuPeers:
    """A lender and a borrower on one GPU, each with its own driver."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu = gpu
        self.libraries = StandInDriver(gpu), StandInDriver(gpu)
        self.memory = StandInDeviceMemory(), StandInDeviceMemory()
        self.lender, self.borrower = (
            CudaSharing(CudaDriver(0, library), memory)
            for library, memory in zip(self.libraries, self.memory, strict=True)
        )


@pytest.fixture
def peers() -> Iterator[GpuPeers]:
    found = GpuPeers(StandInGpu())
    yield found
    assert found.libraries[0].contexts == found.libraries[1].contexts == 0


def test_bytes_are_the_same_on_both_sides_and_all_is_freed(peers: GpuPeers) -> None:
    lent = peers.lender.allocate(5000)
    lent.memory.copy_(torch.arange(5000).to(torch.uint8))
    assert peers.gpu.used == GRANULE  # whole blocks: a handle shows nothing of others
    region = peers.borrower.open(lent.handle())
    assert torch.equal(region.memory, lent.memory)
    for _ in range(2):
        region.close()
    for _ in range(2):
        lent.close()
    assert peers.gpu.used == 0
    assert peers.libraries[1].calls[-3:-1].count("cuIpcCloseMemHandle") == 1


def test_a_process_finds_its_own_region_without_opening_it(peers: GpuPeers) -> None:
    lent = peers.lender.allocate(10)
    region = peers.lender.open(lent.handle())
    assert region.memory.data_ptr() == lent.memory.data_ptr()
    assert "cuIpcOpenMemHandle_v2" not in peers.libraries[0].calls


@pytest.mark.parametrize("fault", ["size", "handle", "short", "gpu", "kind", "none"])
def test_a_handle_that_cannot_be_is_refused_and_nothing_stays_open(peers: GpuPeers, fault: str) -> None:
    lent = peers.lender.allocate(10)
    handle = lent.handle()
    match fault:
        case "size":
            handle.size = GRANULE + 1
        case "none":
            handle.size = 0
        case "handle":
            handle.cuda.handle = bytes(64)
        case "short":
            handle.cuda.handle = handle.cuda.handle[:63]
        case "gpu":
            handle.place.device = "GPU-2"
        case "kind":
            handle.host.inode = 1
    with pytest.raises(RegionRefusedError):
        peers.borrower.open(handle)
    assert not any(peers.gpu.opened.values())


def test_a_full_gpu_is_asked_again_after_torch_gave_back_what_it_keeps() -> None:
    peers = GpuPeers(StandInGpu(capacity=GRANULE))
    lent = peers.lender.allocate(1)
    with pytest.raises(RegionRefusedError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        peers.borrower.allocate(1)
    assert peers.memory[1].cache_freed == 1
    lent.close()
    peers.borrower.allocate(1)


def test_memory_that_cannot_be_exported_is_given_back(peers: GpuPeers) -> None:
    peers.libraries[0].failing["cuIpcGetMemHandle"] = 801
    with pytest.raises(RegionRefusedError, match="error 801"):
        peers.lender.allocate(1)
    assert peers.gpu.used == 0


def test_memory_that_torch_cannot_present_is_freed(peers: GpuPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(address: int, size: int) -> torch.Tensor:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(peers.memory[0], "tensor", fails)
    with pytest.raises(RuntimeError, match="the device has failed"):
        peers.lender.allocate(1)
    assert peers.gpu.used == 0


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(CudaDriverError, match=r"libcuda\.so\.1"):
        CudaDriver(0)


@asynccontextmanager
async def serving(copies: WeightCopies, provider: VersionedWeights) -> AsyncIterator[pb.WeightLocation]:
    server = await start_server("127.0.0.1:0", None, WeightSourceService(lambda: provider, copies))
    try:
        yield pb.WeightLocation(address=f"127.0.0.1:{server.port}")
    finally:
        await server.stop()


def same(weights: FetchedWeights, version: int) -> bool:
    wanted = weights_of(version)
    return all(torch.equal(weights.tensors[name], tensor) for name, tensor in wanted.items())


async def test_weights_come_through_device_memory_and_leave_none_behind(peers: GpuPeers) -> None:
    provider = VersionedWeights(1)

    def read(location: pb.WeightLocation, version: int) -> None:
        with fetch_weights("actor", version, [location], None, (peers.borrower, HOST_SHARING)) as weights:
            assert weights.ways == "device_memory"
            assert same(weights, version)
            weights.confirm()

    async with serving(WeightCopies((peers.lender, HOST_SHARING)), provider) as location:
        for version in (1, 2):
            provider.version = version
            await asyncio.to_thread(read, location, version)
            await asyncio.to_thread(until, lambda: not peers.gpu.used)


@pytest.mark.parametrize("fault", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
async def test_what_the_device_refuses_goes_through_host_memory(peers: GpuPeers, fault: str) -> None:
    for library in peers.libraries:
        library.failing[fault] = 1

    def read(location: pb.WeightLocation) -> None:
        with fetch_weights("actor", 1, [location], None, (peers.borrower, HOST_SHARING)) as weights:
            assert weights.ways == "host_memory"
            assert same(weights, 1)

    async with serving(WeightCopies((peers.lender, HOST_SHARING)), VersionedWeights(1)) as location:
        await asyncio.to_thread(read, location)


async def test_a_lender_that_goes_while_its_device_memory_is_read_is_told_by_confirm(peers: GpuPeers) -> None:
    """CUDA reports nothing about memory whose owner is gone."""
    provider = VersionedWeights(1)
    service = WeightSourceService(lambda: provider, WeightCopies((peers.lender,)))
    server = await start_server("127.0.0.1:0", None, service)
    location = pb.WeightLocation(address=f"127.0.0.1:{server.port}")
    loop = asyncio.get_running_loop()

    def read() -> None:
        with fetch_weights("actor", 1, [location], None, (peers.borrower,)) as weights:
            weights.confirm()
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(WAIT_SECONDS)
            end = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < end:
                weights.confirm()
                time.sleep(0.01)

    peers.gpu.strict = False  # the stand-in's lender is still there, and frees what is open
    with pytest.raises(WorkError, match="ended the loan of its device_memory") as caught:
        await asyncio.to_thread(read)
    assert caught.value.failure.exit_code == ExitCode.RESTART
