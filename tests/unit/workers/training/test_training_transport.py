"""The choice of transport between ranks; ranks that share a device train the same bits through host memory."""

import json
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training.fused_ranks import assert_bitwise, fused_job, fused_table
from tests.support.training.training_ranks import (
    Done,
    ThreadCommunicator,
    exhaust,
    make_batch,
    on_ranks,
    serial,
    trainer_of,
)

from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.communication.host_transport import CpuCopies, HostCommunicator, HostCopy
from rlhf_workers.training.communication.transport import (
    STATEMENT_BYTES,
    GroupTransport,
    RankDevice,
    choose_transport,
    describe,
    read_statement,
)
from rlhf_workers.training.trainer import Trainer

HOST = GroupTransport("host")


def gpu(*names: str, nccl: bool = True) -> RankDevice:
    return RankDevice("cuda", frozenset(names), nccl)


def test_ranks_with_a_gpu_each_speak_over_nccl_and_ranks_on_cpus_over_gloo() -> None:
    assert choose_transport([gpu("a"), gpu("b")], 0) == GroupTransport("nccl")
    assert choose_transport([RankDevice("cpu")] * 2, 1) == GroupTransport("gloo")


def test_one_gpu_with_two_ranks_takes_the_whole_group_through_host_memory() -> None:
    devices = [gpu("a"), gpu("b", "slot 2"), gpu("c", "slot 2"), gpu("d")]
    results = [choose_transport(devices, rank) for rank in range(4)]
    assert [(result.kind, result.sharers) for result in results] == [("host", 1), ("host", 2), ("host", 2), ("host", 1)]
    assert {result.reason for result in results} == {"ranks 1, 2 are on one GPU, which NCCL refuses"}


def test_what_nccl_lacks_is_named() -> None:
    assert choose_transport([gpu("a"), RankDevice("cpu")], 0).reason == "ranks 1 have no GPU, which NCCL needs"
    assert choose_transport([gpu("a"), gpu("b", nccl=False)], 0).reason == "ranks 1 have no NCCL"


def test_a_rank_of_an_older_version_shares_a_device_with_nobody() -> None:
    assert choose_transport([gpu("a"), read_statement(b"1")], 0).kind == "nccl"


@pytest.mark.parametrize("statement", [b"", b"1", b"[]", b'{"kind": 1}', b"\xff", b"{" + b" " * STATEMENT_BYTES + b"}"])
def test_what_is_no_statement_is_read_as_none(statement: bytes) -> None:
    assert read_statement(statement) is None


DEVICES = st.builds(
    RankDevice, st.sampled_from(["cpu", "cuda"]), st.frozensets(st.sampled_from("abc"), max_size=2), st.booleans()
)


@given(st.lists(st.one_of(st.none(), DEVICES), min_size=1, max_size=6))
def test_all_ranks_decide_alike_and_nccl_never_gets_two_ranks_on_one_gpu(devices: list[RankDevice | None]) -> None:
    results = [choose_transport(devices, rank) for rank in range(len(devices))]
    assert len({(result.kind, result.reason) for result in results}) == 1
    assert (results[0].kind == "host") == bool(results[0].reason)
    if results[0].kind == "nccl":
        names = [name for device in devices if device is not None for name in device.names]
        assert len(names) == len(set(names))
        assert all(result.sharers == 1 for result in results)


@given(DEVICES)
def test_a_statement_is_read_as_it_was_made(device: RankDevice) -> None:
    assert read_statement(device.statement()) == device


def test_a_cpu_says_so() -> None:
    assert json.loads(describe(torch.device("cpu")).statement()) == {"kind": "cpu", "names": [], "nccl": False}


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("method", ["serial", FUSED_SPLIT])
def test_ranks_that_share_a_device_train_the_bits_of_others(tmp_path: Path, method: str) -> None:
    job = fused_job(tmp_path)
    table = serial(job, 2, 2) if method == "serial" else fused_table(job, 2, 2, method)

    def work(rank: int, peers: Communicator) -> tuple[Trainer, list[dict[str, float]]]:
        trainer = trainer_of(job, table, rank, 4, peers)
        return trainer, [exhaust(trainer.train(0, make_batch(seed=0)))]

    def through_host(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, list[dict[str, float]]]:
        return work(rank, HostCommunicator(peers, CpuCopies(), HOST))

    assert_bitwise(on_ranks(4, through_host), on_ranks(4, work))


class SlowCopies(CpuCopies):
    """A device that works and copies on demand."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        host = torch.zeros_like(tensor)

        def wait() -> None:
            assert self.done.wait(20), "waited 20 s for the device"
            host.copy_(tensor)

        return HostCopy(host, wait)


def test_a_send_leaves_when_the_device_has_made_it_and_blocks_nobody() -> None:
    copies = SlowCopies()

    def work(rank: int, peers: ThreadCommunicator) -> list[float]:
        communicator = HostCommunicator(peers, copies, HOST)
        values = [torch.full((3,), float(number)) for number in range(4)]
        if rank == 0:
            handles = [communicator.send(value, 1) for value in values]
            assert not any(handle.is_completed() for handle in handles)
            copies.done.set()
        else:
            values = [torch.empty(3) for _ in values]
            handles = [communicator.receive(value, 0) for value in values]
        for handle in reversed(handles):
            handle.wait()
        return [float(value[0]) for value in values]

    assert on_ranks(2, work) == [[0.0, 1.0, 2.0, 3.0]] * 2


class Lost(ThreadCommunicator):
    """A peer that is gone."""

    def __init__(self) -> None: ...

    def receive(self, tensor: torch.Tensor, peer: int) -> Done:
        def wait() -> None:
            raise ConnectionError("rank 1 is gone")

        return Done(wait)


def test_what_goes_wrong_in_a_transfer_is_raised_where_it_is_waited_for() -> None:
    handle = HostCommunicator(Lost(), CpuCopies(), HOST).receive(torch.empty(2), 1)
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        handle.wait()
