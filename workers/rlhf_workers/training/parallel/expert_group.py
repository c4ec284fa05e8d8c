"""The data parallel ranks that divide the experts of every layer, and the exchange of rows between them.

Rule: every rank of the group makes the same exchanges in the same order. A rank also takes part if it receives no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_workers.models.experts import Compute
from rlhf_workers.models.precision import as_multiplied
from rlhf_workers.training.communication.communicator import Communicator, RowCounts


@dataclass
class ExpertGroup:
    """A rank's place in its group, with the communicator."""

    rank: int
    """Number of this rank in the group, and of its equal part of the experts."""
    ranks: tuple[int, ...]
    """Global ranks in order of their number."""
    communicator: Communicator | None = None
    """None until the ranks have met."""

    def spread(self, rows: torch.Tensor, counts: Sequence[int], compute: Compute) -> torch.Tensor:
        """Return [n, hidden] for rows [n, hidden], with `counts` rows per expert of the layer. The rank of an expert
        computes its rows.
        """
        rows = as_multiplied(rows)
        size = len(self.ranks)
        local_experts = len(counts) // size
        row_counts = self._counts(counts, rows.device)
        sent = [sum(counts[first : first + local_experts]) for first in range(0, len(counts), local_experts)]
        moved = RowCounts(
            [sum(row_counts[first : first + local_experts]) for first in range(0, len(row_counts), local_experts)], sent
        )
        came: torch.Tensor = _exchange(rows, self, moved)
        repeats = torch.tensor(row_counts, device=rows.device)
        order = (
            torch.arange(local_experts, device=rows.device).repeat(size).repeat_interleave(repeats).argsort(stable=True)
        )
        outputs = compute(
            came.index_select(0, order), [sum(row_counts[expert::local_experts]) for expert in range(local_experts)]
        )
        return _exchange(outputs.index_select(0, order.argsort()), self, moved.back)

    def _counts(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return the number of rows that each rank has for each expert of this one, rank by rank."""
        sent = torch.tensor(counts, device=device)
        received, equal = torch.empty_like(sent), [len(counts) // len(self.ranks)] * len(self.ranks)
        self.all_to_all(received, sent, RowCounts(equal, equal))
        row_counts: list[int] = received.tolist()
        return row_counts

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts) -> None:
        """Exchange rows with the group."""
        assert self.communicator is not None, "a stage is used once its group has met"
        self.communicator.all_to_all(received, sent, rows, self.ranks)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ExpertGroup, moved: RowCounts) -> torch.Tensor:
        ctx.group, ctx.moved = group, moved
        return _moved(rows, group, moved)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _moved(gradients[0], ctx.group, ctx.moved.back), None, None


def _exchange(rows: torch.Tensor, group: ExpertGroup, moved: RowCounts) -> torch.Tensor:
    came: torch.Tensor = _Exchanged.apply(rows, group, moved)  # type: ignore[no-untyped-call]
    return came


def _moved(rows: torch.Tensor, group: ExpertGroup, moved: RowCounts) -> torch.Tensor:
    came = rows.new_empty(sum(moved.received), *rows.shape[1:])
    group.all_to_all(came, rows.contiguous(), moved)
    return came
