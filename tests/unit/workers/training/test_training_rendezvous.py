"""Rendezvous: a time-out names the missing ranks; an address in use is named."""

import socket

import pytest
import torch
import torch.distributed as dist
from tests.support.loopback import LOOPBACKS, free_address

from rlhf_common import control_pb2 as pb
from rlhf_workers import peer_server
from rlhf_workers.failures import WorkError
from rlhf_workers.settings import join_address
from rlhf_workers.training.communication.rendezvous import join_group, leave_group


def join(rank: int, address: str) -> None:
    command = pb.BecomeTraining(rank=rank, world_size=4, rendezvous=address, group_epoch=3)
    join_group(command, torch.device("cpu"), timeout=0.3)


def test_missing_ranks_are_named() -> None:
    address = free_address()
    with pytest.raises(WorkError, match=rf"epoch 3: rank 0 waited for ranks 1, 2, 3 of 4 at {address}") as caught:
        join(0, address)
    failure = caught.value.failure
    assert (failure.reason, failure.retryable, failure.exit_code) == ("RendezvousTimeout", True, 75)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_ranks_meet_by_either_family(host: str) -> None:
    address = join_address(host, peer_server.free_port(host))
    join_group(pb.BecomeTraining(rank=0, world_size=1, rendezvous=address), torch.device("cpu"), timeout=60)
    try:
        assert dist.get_world_size() == 1
    finally:
        leave_group()


def test_a_missing_first_rank_is_named() -> None:
    address = free_address()
    with pytest.raises(WorkError, match=rf"rank 2 waited for rank 0 of 4 at {address}"):
        join(2, address)


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorkError, match=rf"rank 0 cannot listen at {address}") as caught:
            join(0, address)
    assert caught.value.failure.exit_code == 24


def test_a_malformed_address_is_named() -> None:
    with pytest.raises(WorkError, match=r"becomeTraining.rendezvous: 'nowhere' is not host:port"):
        join(0, "nowhere")
