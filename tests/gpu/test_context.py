"""Attention of ranks that share a sample by position, on one device: results and gradients of whole attention.

The ranks run in turn, and the data of the other ranks is available locally. This checks the kernels for a rank's
chunks, in which a chunk attends to more keys than it has queries.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from tests.gpu.timing import best_seconds, name_of
from transformers import AttentionInterface

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.training.parallel.context_attention import CONTEXT, ChunkMasks
from rlhf_workers.training.parallel.context_group import ContextCut, ContextGroup
from rlhf_workers.training.schedule.step_timing import NoCommunicator

TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Tolerance relative to the largest number of a tensor: kernels of other shapes sum in another order."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ContextSizes:
    """Sizes of one layer's attention, and of the group."""

    ranks: int
    heads: int
    key_value_heads: int
    width: int
    length: int
    window: int
    """Window of the layer that has one."""
    repeats: int


SMALL = ContextSizes(ranks=2, heads=4, key_value_heads=2, width=8, length=32, window=11, repeats=1)
LARGE = ContextSizes(ranks=4, heads=32, key_value_heads=8, width=128, length=16384, window=4096, repeats=3)


class OthersAtHand(NoCommunicator):
    """Gives a rank the prepared keys and values, and collects the gradients of each for their sum."""

    def __init__(self, positions: torch.Tensor) -> None:
        """`positions`: keys and values of all positions, position first."""
        self._positions = positions
        self.cut: ContextCut | None = None
        """Cut of the rank whose turn it is."""
        self.gradients: dict[int, torch.Tensor] = {}
        """Rank -> gradients of `positions`, of its last backward."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        assert self.cut is not None
        whole.copy_(self._positions.index_select(0, self.cut.back))

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        assert self.cut is not None
        self.gradients[self.cut.group.rank] = whole.index_select(0, self.cut.order)
        own.zero_()


@pytest.mark.gpu(seconds=60, gigabytes=40)
def test_context(machine: CheckedMachine, figures: Figures) -> None:
    """Attention of ranks that share samples by position: results and gradients of whole attention; a rank's time."""
    sizes, device = machine.sized(SMALL, LARGE), machine.device
    for dtype, window in product(machine.dtypes, (None, sizes.window)):
        generator = torch.Generator(device=device).manual_seed(0)
        draw = partial(torch.randn, device=device, dtype=dtype, generator=generator)
        heads = {"query": sizes.heads, "key": sizes.key_value_heads, "value": sizes.key_value_heads}
        inputs = {name: draw(1, count, sizes.length, sizes.width) for name, count in heads.items()}
        slope = draw(1, sizes.length, sizes.heads, sizes.width)
        layer = SimpleNamespace(num_key_value_groups=sizes.heads // sizes.key_value_heads, is_causal=True)
        expected, seconds_whole = whole(layer, inputs, slope, window, sizes, device)
        found, seconds = by_ranks(layer, inputs, slope, window, sizes, device)
        name = f"{name_of(dtype)}, {'all keys' if window is None else f'window {window}'}"
        apart = {
            key: float((found[key].float() - value.float()).abs().max() / value.abs().max())
            for key, value in expected.items()
        }
        figures.row("attention", what=name, ranks=sizes.ranks, seconds=seconds, of_whole=seconds / seconds_whole)
        figures.check(
            f"{name}: results and gradients are those of whole attention",
            max(apart.values()) <= TOLERANCES[dtype],
            ", ".join(f"{key} {value:.3g}" for key, value in apart.items()),
        )


def whole(
    layer: Any, inputs: Tensors, slope: torch.Tensor, window: int | None, sizes: ContextSizes, device: torch.device
) -> tuple[Tensors, float]:
    """Return results and gradients of one rank with all positions, and its seconds."""
    own = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    mask = None
    if window is not None or slope.dtype == torch.float32:  # no kernel has float32 and fewer key heads without one
        position = torch.arange(sizes.length, device=device)
        distance = position[:, None] - position
        mask = ((distance >= 0) & (distance < (window or sizes.length)))[None, None]
    attend = partial(AttentionInterface()["sdpa"], layer, own["query"], own["key"], own["value"], mask)
    once = partial(forward_and_backward, attend, own, slope)
    return {"result": once(), **gradients_of(own)}, best_seconds(once, sizes.repeats, device)


def by_ranks(
    layer: Any, inputs: Tensors, slope: torch.Tensor, window: int | None, sizes: ContextSizes, device: torch.device
) -> tuple[Tensors, float]:
    """Return the same from ranks that share the positions, and the seconds of the slowest."""
    others = OthersAtHand(torch.cat((inputs["key"], inputs["value"]), dim=1).movedim(2, 0))
    result, of_query, slowest = torch.empty_like(slope), torch.empty_like(inputs["query"]), 0.0
    for rank in range(sizes.ranks):
        group = ContextGroup(rank, tuple(range(sizes.ranks)), others)
        cut = ContextCut.for_lengths(group, [sizes.length]).moved(lambda tensor: tensor.to(device))
        others.cut = cut
        own = {name: value.index_select(2, cut.columns).requires_grad_() for name, value in inputs.items()}
        masks = {CONTEXT: ChunkMasks.for_cut(cut, window, eager=False, hidden=slope)}
        attend = AttentionInterface()["context_sdpa"]
        attend = partial(attend, layer, own["query"], own["key"], own["value"], None, **masks)
        once = partial(forward_and_backward, attend, own, slope.index_select(1, cut.columns))
        slowest = max(slowest, best_seconds(once, sizes.repeats, device))
        result[:, cut.columns] = once()
        of_query[:, :, cut.columns] = gradients_of(own)["query"]
    of_keys, of_values = sum(others.gradients.values(), torch.zeros((), device=device)).movedim(0, 2).chunk(2, dim=1)
    return {"result": result, "query": of_query, "key": of_keys, "value": of_values}, slowest


def forward_and_backward(attend: Any, own: Tensors, slope: torch.Tensor) -> torch.Tensor:
    """Return the results, and leave the gradients."""
    for value in own.values():
        value.grad = None
    result: torch.Tensor = attend()[0]
    result.backward(slope)
    return result.detach()


def gradients_of(own: Tensors) -> Tensors:
    """Return the gradients that a backward left."""
    return {name: value.grad for name, value in own.items() if value.grad is not None}
