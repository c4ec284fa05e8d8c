"""Transfers by the rules of NCCL, which gloo hides.

A rank's transfers run one after the other in the order they were posted, and none ends before its peer takes part in
it. Ranks are threads, which block only while they wait.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_workers.training.communication.communicator import RowCounts
from rlhf_workers.training.communication.transport import GroupTransport


class StuckRanksError(Exception):
    """All ranks wait, and no transfer can run."""


@dataclass(eq=False)
class _Transfer:
    network: "RendezvousNetwork"
    sends: bool
    peer: int
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        self.network.wait(self)

    def is_completed(self) -> bool:
        return self.done


class RendezvousNetwork:
    """One communicator of `world` ranks."""

    def __init__(self, world: int) -> None:
        self._queues: list[deque[_Transfer]] = [deque() for _ in range(world)]
        self._changed = threading.Condition()
        self._working, self._stuck = world, False
        self._waited_for: list[_Transfer] = []

    def post(self, rank: int, transfer: _Transfer) -> None:
        """Queue a transfer behind all earlier ones of its rank, and run the transfers that can run."""
        with self._changed:
            self._queues[rank].append(transfer)
            while any(self._run_head(other) for other in range(len(self._queues))):
                pass
            self._changed.notify_all()

    def wait(self, transfer: _Transfer) -> None:
        """Return when the transfer is over; raises StuckRanksError if it never will be."""
        with self._changed:
            if transfer.done:
                return
            self._waited_for.append(transfer)
            self.stop_working()
            self._changed.wait_for(lambda: transfer.done or self._stuck)
            if not transfer.done:
                raise StuckRanksError("; ".join(f"rank {rank}: {_said(q)}" for rank, q in enumerate(self._queues)))

    def stop_working(self) -> None:
        """Note that a rank waits or has reached the end of its row."""
        with self._changed:
            self._working -= 1
            self._stuck = self._stuck or self._working == 0
            self._changed.notify_all()

    def _run_head(self, rank: int) -> bool:
        """Run the transfer at the head of a sender's queue, if its receiver has reached it."""
        if not self._queues[rank] or not self._queues[rank][0].sends:
            return False
        peer = self._queues[rank][0].peer
        if not self._queues[peer] or self._queues[peer][0].sends or self._queues[peer][0].peer != rank:
            return False
        source, target = self._queues[rank].popleft(), self._queues[peer].popleft()
        target.tensor.copy_(source.tensor)
        for transfer in (source, target):
            transfer.done = True
            if transfer in self._waited_for:
                self._waited_for.remove(transfer)
                self._working += 1
        return True


class RendezvousCommunicator:
    """Implements `Communicator` for rows of a table, which have no reduction."""

    transport = GroupTransport("nccl")

    def __init__(self, network: RendezvousNetwork, rank: int) -> None:
        self._network, self._rank = network, rank

    def send(self, tensor: torch.Tensor, peer: int) -> _Transfer:
        return self._post(True, peer, tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> _Transfer:
        return self._post(False, peer, tensor)

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None: ...

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]
    ) -> None: ...

    def _post(self, sends: bool, peer: int, tensor: torch.Tensor) -> _Transfer:
        transfer = _Transfer(self._network, sends, peer, tensor)
        self._network.post(self._rank, transfer)
        return transfer


def run_ranks(world: int, work: Callable[[int, RendezvousCommunicator], Any]) -> list[Any]:
    """Run `work(rank, communicator)` on threads; return the results by rank. Raises StuckRanksError when they get
    stuck.
    """
    network = RendezvousNetwork(world)

    def run(rank: int) -> Any:
        try:
            return work(rank, RendezvousCommunicator(network, rank))
        finally:
            network.stop_working()

    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(world)]]


def _said(transfers: deque[_Transfer]) -> str:
    if not transfers:
        return "nothing"
    return f"{'sends to' if transfers[0].sends else 'receives from'} rank {transfers[0].peer}"
