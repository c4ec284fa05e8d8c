"""Attention of ranks that share a sample by position, on one device: results and gradients of whole attention.

The ranks take their turns, and what would come from the others is at hand: what is checked are the kernels that a
rank's chunks ask for, by which a chunk attends to more keys than it has queries.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import AttentionInterface

from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.timing import best_seconds
from rlhf_workers.training.parallel.context_attention import CONTEXT, ChunkMasks
from rlhf_workers.training.parallel.context_group import ContextCut, ContextGroup
from rlhf_workers.training.schedule.step_timing import NoCommunicator

TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the largest number of a tensor: kernels of other shapes sum in another order."""


@dataclass(frozen=True)
class ContextSizes:
    """Of one layer's attention, and of the group."""

    ranks: int
    heads: int
    key_value_heads: int
    width: int
    length: int
    window: int
    """Of the layer that has one."""
    repeats: int


class OthersAtHand(NoCommunicator):
    """Gives a rank the keys and values that were put here, and keeps the gradients of each for their sum."""

    def __init__(self, made: torch.Tensor) -> None:
        """`made`: keys and values of all positions, position first."""
        self._made = made
        self.cut: ContextCut | None = None
        """Of the rank whose turn it is."""
        self.gradients: dict[int, torch.Tensor] = {}
        """Rank -> gradients of `made`, of its last backward."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        assert self.cut is not None
        whole.copy_(self._made.index_select(0, self.cut.back))

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        assert self.cut is not None
        self.gradients[self.cut.group.rank] = whole.index_select(0, self.cut.order)
        own.zero_()


def run(machine: CheckedMachine, sizes: ContextSizes, report: Report) -> None:
    """Compares each precision, with a window and without."""
    for dtype in (torch.bfloat16, torch.float32) if machine.bfloat16 or not machine.cuda else (torch.float32,):
        for window in (None, sizes.window):
            compare(torch.device(machine.device), sizes, dtype, window, report)


def compare(device: torch.device, sizes: ContextSizes, dtype: torch.dtype, window: int | None, report: Report) -> None:
    """Computes the same attention whole and by ranks, forward and backward."""
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = {"query": sizes.heads, "key": sizes.key_value_heads, "value": sizes.key_value_heads}
    given = {
        name: torch.randn(1, heads, sizes.length, sizes.width, device=device, dtype=dtype, generator=generator)
        for name, heads in shapes.items()
    }
    slope = torch.randn(1, sizes.length, sizes.heads, sizes.width, device=device, dtype=dtype, generator=generator)
    layer = SimpleNamespace(num_key_value_groups=sizes.heads // sizes.key_value_heads, is_causal=True)
    expected, seconds_whole = whole(layer, given, slope, window, sizes, device)
    found, seconds = by_ranks(layer, given, slope, window, sizes, device)
    name = f"{str(dtype).removeprefix('torch.')}, {'all keys' if window is None else f'window {window}'}"
    apart = {
        key: float((found[key].float() - one.float()).abs().max() / one.abs().max()) for key, one in expected.items()
    }
    report.row("attention", what=name, ranks=sizes.ranks, seconds=max(seconds), of_whole=max(seconds) / seconds_whole)
    report.check(
        f"{name}: results and gradients are those of whole attention",
        max(apart.values()) <= TOLERANCES[dtype],
        ", ".join(f"{key} {value:.3g}" for key, value in apart.items()),
    )


Given = dict[str, torch.Tensor]


def whole(
    layer: Any, given: Given, slope: torch.Tensor, window: int | None, sizes: ContextSizes, device: torch.device
) -> tuple[Given, float]:
    """Return results and gradients of one rank that has all positions, and its seconds."""
    own = {name: value.clone().requires_grad_() for name, value in given.items()}
    mask = None
    if window is not None or slope.dtype == torch.float32:  # no kernel has float32 and fewer key heads without one
        position = torch.arange(sizes.length, device=device)
        distance = position[:, None] - position
        mask = ((distance >= 0) & (distance < (window or sizes.length)))[None, None]
    attend = partial(AttentionInterface()["sdpa"], layer, own["query"], own["key"], own["value"], mask)

    def once() -> torch.Tensor:
        for value in own.values():
            value.grad = None
        result: torch.Tensor = attend()[0]
        result.backward(slope)
        return result

    result = once().detach()
    return {"result": result, **gradients_of(own)}, best_seconds(once, sizes.repeats, device)


def by_ranks(
    layer: Any, given: Given, slope: torch.Tensor, window: int | None, sizes: ContextSizes, device: torch.device
) -> tuple[Given, list[float]]:
    """Return the same by ranks that share the positions, and the seconds of each."""
    made = torch.cat((given["key"], given["value"]), dim=1).movedim(2, 0)
    others = OthersAtHand(made)
    result, of_query, seconds = torch.empty_like(slope), torch.empty_like(given["query"]), []
    for rank in range(sizes.ranks):
        group = ContextGroup(rank, tuple(range(sizes.ranks)), others)
        cut = ContextCut.for_lengths(group, [sizes.length]).moved(lambda tensor: tensor.to(device))
        others.cut = cut
        own = {name: value.index_select(2, cut.columns).requires_grad_() for name, value in given.items()}
        masks = ChunkMasks.for_cut(cut, window, eager=False, hidden=slope)
        once = partial(one_rank, layer, own, masks, slope.index_select(1, cut.columns))
        seconds.append(best_seconds(once, sizes.repeats, device))
        result[:, cut.columns] = once()
        of_query[:, :, cut.columns] = gradients_of(own)["query"]
    of_keys, of_values = sum(others.gradients.values(), torch.zeros((), device=device)).movedim(0, 2).chunk(2, dim=1)
    return {"result": result, "query": of_query, "key": of_keys, "value": of_values}, seconds


def one_rank(layer: Any, own: Given, masks: ChunkMasks, slope: torch.Tensor) -> torch.Tensor:
    """Return a rank's results, and leave the gradients."""
    for value in own.values():
        value.grad = None
    attend = AttentionInterface()["context_sdpa"]
    result: torch.Tensor = attend(layer, own["query"], own["key"], own["value"], None, **{CONTEXT: masks})[0]
    result.backward(slope)
    return result.detach()


def gradients_of(own: Given) -> Given:
    """Return the gradients that a backward left."""
    return {name: value.grad for name, value in own.items() if value.grad is not None}


STEP = CheckStep(
    "context",
    "attention of ranks that share samples by position: results and gradients of whole attention; a rank's time",
    run,
    small=ContextSizes(ranks=2, heads=4, key_value_heads=2, width=8, length=32, window=11, repeats=1),
    gpu=ContextSizes(ranks=4, heads=32, key_value_heads=8, width=128, length=16384, window=4096, repeats=3),
    limit_seconds=60,
    gpu_gigabytes=40,
)
