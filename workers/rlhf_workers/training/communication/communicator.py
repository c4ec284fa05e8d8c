"""Transfers and collective operations between training ranks over torch.distributed.

Sends and receives do not block; both sides know the shapes. The other operations block (on CUDA: the stream), and their
ranks must call them in the same order. A RuntimeError of torch.distributed, such as that of a lost peer, becomes a
PeerLostError.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rlhf_common.error_text import one_line
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.communication.collective_waits import told_to_wait_for
from rlhf_workers.training.communication.transport import GroupTransport


class PeerLostError(WorkError):
    """torch.distributed failed while this rank waited for others, usually because one is gone; the group must
    restart."""

    def __init__(self, waited_for: str, error: Exception, *, rank: int | None = None, step: str = "") -> None:
        """`rank`: the waiting rank, if known; `step`: its activity, such as a step of its schedule row."""
        reason = one_line(str(error)) or type(error).__name__
        who = "a training rank" if rank is None else f"training rank {rank}"
        during = f" at {step}" if step else ""
        super().__init__(
            "PeerLost",
            f"{who} lost its group while waiting for {waited_for}{during}: {reason}",
            retryable=True,
            exit_code=ExitCode.RESTART,
        )
        self._waited_for, self._error, self._rank = waited_for, error, rank

    def during(self, step: str) -> "PeerLostError":
        """Return the same failure with the rank's activity."""
        return PeerLostError(self._waited_for, self._error, rank=self._rank, step=step)


class Handle(Protocol):
    """A transfer in progress."""

    def wait(self) -> None:
        """Return when the tensor may be used again. Raises PeerLostError."""

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""


class Communicator(Protocol):
    """Communicates with the other ranks of a training group; rank numbers are global."""

    transport: GroupTransport
    """Transport of tensors."""

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        """Start sending; `tensor` must not change until the handle is done. The k-th send matches the peer's k-th
        receive from this rank."""

    def receive(self, tensor: torch.Tensor, peer: int) -> Handle:
        """Start receiving into `tensor`."""

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Sum in place over `ranks`; the result has the same bits on all of them."""

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Take the element-wise maximum in place over `ranks`."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Fill `whole` with `own` of each of `ranks`, concatenated in dimension 0; all have the same size."""

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Fill `own` with this rank's part of the sum of `whole`, cut in dimension 0 as `all_gather` concatenates."""

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        """Copy the tensor of `source`, one of `ranks`, to the others."""

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, rows: "RowCounts", ranks: tuple[int, ...]) -> None:
        """Send each of `ranks` its rows of `sent` and fill `received` with theirs, both contiguous and in the order of
        `ranks`; a pair may exchange no rows."""


@dataclass(frozen=True)
class RowCounts:
    """Number of rows, along dimension 0, that a rank exchanges with each rank of a group, including itself."""

    received: Sequence[int]
    sent: Sequence[int]

    @property
    def back(self) -> "RowCounts":
        """Return the counts of the exchange that returns all rows."""
        return RowCounts(self.sent, self.received)


class TorchCommunicator:
    """Uses the default process group, which must exist. Subgroups are created at once, in the same order on every
    rank."""

    def __init__(self, rank: int, groups: list[tuple[int, ...]], transport: GroupTransport) -> None:
        """`groups`: every set of ranks that will communicate together, the same list on every rank."""
        self.transport = transport
        everyone = tuple(range(dist.get_world_size()))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}
        for ranks in dict.fromkeys(groups):
            if len(ranks) > 1 and ranks not in self._groups:
                process_group = dist.new_group(list(ranks))
                if rank in ranks:
                    self._groups[ranks] = process_group

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        with waiting_for(f"rank {peer} to take a transfer"):
            return _TorchHandle(dist.isend(tensor, peer), f"rank {peer} to take a transfer")

    def receive(self, tensor: torch.Tensor, peer: int) -> Handle:
        with waiting_for(f"a transfer of rank {peer}"):
            return _TorchHandle(dist.irecv(tensor, peer), f"a transfer of rank {peer}")

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._reduce(tensor, ranks, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._reduce(tensor, ranks, dist.ReduceOp.MAX)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        with waiting_for(f"ranks {', '.join(map(str, ranks))} to join a gathering"):
            dist.all_gather_single(whole, own, group=self._groups[ranks])

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        with waiting_for(f"ranks {', '.join(map(str, ranks))} to join a reduction"):
            dist.reduce_scatter_single(own, whole, dist.ReduceOp.SUM, group=self._groups[ranks])

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            with waiting_for(f"ranks {', '.join(map(str, ranks))} to join a broadcast of rank {source}"):
                dist.broadcast(tensor, source, group=self._groups[ranks])

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]) -> None:
        with waiting_for(f"ranks {', '.join(map(str, ranks))} to join an exchange"):
            counts = list(rows.received), list(rows.sent)
            dist.all_to_all_single(received, sent, *counts, group=self._groups[ranks])

    def _reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], operation: "dist.ReduceOp.RedOpType") -> None:
        if len(ranks) > 1:
            with waiting_for(f"ranks {', '.join(map(str, ranks))} to join a reduction"):
                dist.all_reduce(tensor, operation, group=self._groups[ranks])


class _TorchHandle:
    def __init__(self, work: "dist.Work | None", waits_for: str) -> None:
        assert work is not None, "this rank is in every group of its own"
        self._work, self._waits_for = work, waits_for

    def wait(self) -> None:
        with waiting_for(self._waits_for):
            self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def waiting_for(waited_for: str) -> Iterator[None]:
    """Raise PeerLostError for a RuntimeError, with which torch.distributed reports a lost or silent peer.

    While the context is open, heartbeats report the wait.
    """
    try:
        with told_to_wait_for(waited_for):
            yield
    except RuntimeError as error:
        rank = dist.get_rank() if dist.is_initialized() else None
        raise PeerLostError(waited_for, error, rank=rank) from error
