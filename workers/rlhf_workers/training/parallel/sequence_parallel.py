"""Sequence parallelism: the operations of a tensor group in which each rank has some positions of every row.

Owns the conversions between states divided by position, [s / ranks, b, hidden], and computations of whole rows.

Rule: every rank makes the same calls in the same order.

Must never keep a whole row for a backward: a linear layer gathers the others' positions again for the gradient of its
weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from rlhf_workers.training.parallel.tensor_group import TensorGroup


def own_positions(length: int, group: TensorGroup) -> int:
    """Return the number of positions per rank for rows of `length`; rows are padded to a multiple of the ranks."""
    return -(-length // group.size)


def divided_sum(partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return this rank's positions [s / ranks, ...] of the sum of all ranks' partial results, [s, ...]."""
    return _apply(_DividedSum, partial, group)


def whole_rows(own: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return all positions [s, ...] from this rank's [s / ranks, ...], for computations that every rank does alike: the
    gradient of each is its own part."""
    return _apply(_WholeRows, own, group)


def linear_of_rows(
    own: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorGroup
) -> torch.Tensor:
    """Return a linear layer's outputs on this rank, [s, b, out], for its positions of the input, [s / ranks, b, in]."""
    layer = _LinearUse(weight, bias, group)
    output = _apply(_OfInput, own, layer)
    return _apply(_Both, output, _apply(_OfWeight, weight, bias, layer))


@dataclass
class _LinearUse:
    """Shared data of the two nodes of one use of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    group: TensorGroup
    input: torch.Tensor | None = None
    """This rank's positions, in the type of the product."""
    output: torch.Tensor | None = None
    """The layer's output; never an argument of the weight's node, since it would connect the weight to the input."""


class _DividedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(partial, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].chunk(ctx.group.size)[ctx.group.rank].contiguous(), None


class _OfInput(torch.autograd.Function):
    """The layer as a function of its input."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, layer: _LinearUse) -> torch.Tensor:
        kind = own.device.type
        lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own.dtype
        layer.input = own.detach().to(lower)
        ctx.group, ctx.kind = layer.group, own.dtype
        ctx.save_for_backward(layer.weight)
        layer.output = functional.linear(_gathered(layer.input, layer.group), layer.weight, layer.bias)
        return layer.output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        of_rows = torch.matmul(gradients[0], weight.to(gradients[0].dtype))
        return _summed(of_rows.to(ctx.kind), ctx.group), None


class _OfWeight(torch.autograd.Function):
    """The layer as a function of its weight and bias; its result is a zero whose gradient is the output's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, layer: _LinearUse) -> torch.Tensor:
        assert layer.input is not None
        assert layer.output is not None
        ctx.group, ctx.kind, ctx.has_bias = layer.group, weight.dtype, bias is not None
        ctx.save_for_backward(layer.input)
        return layer.output.new_zeros(()).expand(layer.output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (own,) = ctx.saved_tensors
        rows, of_output = _gathered(own, ctx.group).flatten(0, 1), gradients[0].flatten(0, 1)
        of_weight = torch.mm(rows.t(), of_output).t().to(ctx.kind)
        return of_weight, of_output.sum(0).to(ctx.kind) if ctx.has_bias else None, None


class _Both(torch.autograd.Function):
    """The output, whose gradient flows to both nodes."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, shell: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0]


def _gathered(own: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    assert group.communicator is not None, "a stage is used once its group has met"
    whole = own.new_empty(len(own) * group.size, *own.shape[1:])
    group.communicator.all_gather(whole, own.contiguous(), group.ranks)
    return whole


def _summed(partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    assert group.communicator is not None, "a stage is used once its group has met"
    own = partial.new_empty(len(partial) // group.size, *partial.shape[1:])
    group.communicator.reduce_scatter_sum(own, partial.contiguous(), group.ranks)
    return own


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result
