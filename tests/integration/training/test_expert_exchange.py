"""The exchange of experts' rows between real processes over gloo: every row returns, and a lost peer is named."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf_workers.training.communication.communicator import PeerLostError, TorchCommunicator
from rlhf_workers.training.communication.host_transport import CpuCopies, HostCommunicator
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.parallel.expert_group import ExpertGroup

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]
COUNTS = ([3, 0, 0, 0], [2, 1, 0, 4])
"""Rows of each rank for each of four experts, two per rank: the second rank gets none of the first."""


def exchange(rank: int, folder: str, results: Connection) -> None:
    """Distribute rows over two ranks with both transports, forward and backward; the second rank then ends."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    direct = TorchCommunicator(rank, [(0, 1)], GroupTransport("gloo"))
    group, came = ExpertGroup(rank, (0, 1)), True

    def compute(rows: torch.Tensor, each: object) -> torch.Tensor:
        return rows * (rank + 2)

    for communicator in (direct, HostCommunicator(direct, CpuCopies(), GroupTransport("host"))):
        for dtype in (torch.float32, torch.bfloat16):
            group.communicator, counts = communicator, COUNTS[rank]
            rows = torch.arange(3.0 * sum(counts), dtype=dtype).view(-1, 3).requires_grad_()
            outputs = group.spread(rows, counts, compute)
            outputs.sum().backward()
            factors = torch.tensor([2] * sum(counts[:2]) + [3] * sum(counts[2:]), dtype=dtype)[:, None]
            assert rows.grad is not None
            came = came and bool(outputs.equal(rows * factors) and rows.grad.equal(factors.expand_as(rows)))
    lost = ""
    if rank == 0:
        try:
            group.spread(torch.ones(3, 3), COUNTS[0], compute)
        except PeerLostError as error:
            lost = str(error)
    results.send((came, lost))


def test_rows_come_back_and_a_peer_that_is_gone_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=exchange, args=(rank, str(tmp_path), theirs)) for rank, (_, theirs) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = [ours.recv() if ours.poll(90) else (False, "no answer") for ours, _ in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert [came for came, _ in found] == [True, True]
    assert "training rank 0 lost its group while waiting for ranks 0, 1 to join an exchange" in found[0][1]
