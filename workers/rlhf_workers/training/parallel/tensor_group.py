"""The ranks that hold one stage in parts and compute its layers together, and the sums between them.

Owns the communication between them in a forward and a backward.

Rule: every rank of the group makes the same sums in the same order. With one rank there is no sum, copy or node in the
graph.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_workers.training.communication.communicator import Communicator


@dataclass
class TensorGroup:
    """A rank's place in its group, with the communicator."""

    rank: int = 0
    """Number of this rank in the group."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks in order of their number; not used for a group of one rank."""
    communicator: Communicator | None = None
    """None until the ranks have met."""
    by_position: bool = False
    """Whether each rank has some positions of the states between layers: sequence parallelism (`sequence_parallel`)."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group, in new memory."""
        assert self.communicator is not None, "a stage is used once its group has met"
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce_sum(total, self.ranks)
        return total

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all ranks hold alike, as input of their own parts of a computation: its gradient is the
        sum over the ranks."""
        return tensor if self.size == 1 else _apply(_Shared, tensor, self)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' results; its gradient goes to each rank."""
        return tensor if self.size == 1 else _apply(_Summed, tensor, self)

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenated last dimensions of all ranks; each rank's gradient is its own part."""
        return tensor if self.size == 1 else _apply(_Joined, tensor, self)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.add_up(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Joined(torch.autograd.Function):
    """Concatenation by a sum with zeros for other ranks' parts: exact, with twice the bytes of a gathering."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group, width = group, tensor.shape[-1]
        whole = tensor.new_zeros(*tensor.shape[:-1], width * group.size)
        whole[..., group.rank * width : (group.rank + 1) * width] = tensor
        assert group.communicator is not None, "a stage is used once its group has met"
        group.communicator.all_reduce_sum(whole, group.ranks)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        width = gradients[0].shape[-1] // ctx.group.size
        return gradients[0][..., ctx.group.rank * width : (ctx.group.rank + 1) * width].contiguous(), None


def _apply(function: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    result: torch.Tensor = function.apply(tensor, group)
    return result
