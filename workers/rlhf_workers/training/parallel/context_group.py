"""The ranks that share each sample by position, which positions are whose, and what crosses between them.

Owns context parallelism's cut of a micro-batch. Each sample is padded to a multiple of twice the ranks and cut into so
many equal chunks; a rank has one from the front and its mirror image from the back, so that all attend to equally many
keys. Layers compute a rank's own positions alone. Keys and values are gathered, layer by layer, and the few numbers
that the last stage makes of trained tokens, from which every rank computes the loss alike. The loss's gradient goes
through a rank's own tokens, so that gradients add up over the ranks as those of data parallel ones do.

Rule: every rank of the group asks for the same in the same order, as all run one row of the schedule table on the same
samples. What a gradient of keys is summed in is float32, whatever they are made in. Must never gather states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch

from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout

CHUNKS_A_RANK: Final = 2
"""One from the front of a sample and its mirror image from the back."""


@dataclass(frozen=True)
class ContextGroup:
    """A rank's place in its group, and its way to the others."""

    rank: int
    """Number of this rank in the group."""
    ranks: tuple[int, ...]
    """Global ranks, by their number."""
    communicator: Communicator

    @property
    def chunks(self) -> int:
        """Chunks of a sample; its positions are a multiple of them."""
        return CHUNKS_A_RANK * len(self.ranks)


@dataclass(frozen=True)
class SampleChunk:
    """Consecutive positions of one sample that a rank computes."""

    start: int
    """Of the first, in the sample."""
    length: int


@dataclass(frozen=True)
class ContextCut:
    """A rank's part of the rows of a micro-batch, all of which are cut alike."""

    group: ContextGroup
    lengths: tuple[int, ...]
    """Positions of each sample of a row, one behind the other; of padded rows the length of a row."""
    columns: torch.Tensor
    """int64 [l]: places in a row of this rank's positions, sample by sample, rising."""
    positions: torch.Tensor
    """int64 [l]: the same, in their samples."""
    order: torch.Tensor
    """int64 [L]: where each position of a row is among those of all ranks, laid end to end."""
    back: torch.Tensor
    """int64 [L]: the inverse, places in a row."""

    @classmethod
    def for_lengths(cls, group: ContextGroup, lengths: Sequence[int]) -> "ContextCut":
        """Cut rows of samples of so many positions, on the CPU; ValueError where one is no multiple of the chunks."""
        by_rank = [_columns(rank, group.chunks, lengths) for rank in range(len(group.ranks))]
        back = torch.cat([torch.cat(parts) for parts in by_rank])
        starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        own = [part - start for part, start in zip(by_rank[group.rank], starts, strict=True)]
        columns = torch.cat(by_rank[group.rank])
        return cls(group, tuple(lengths), columns, torch.cat(own), back.argsort(), back)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "ContextCut":
        """Return it with every tensor moved."""
        columns, positions, order, back = map(move, (self.columns, self.positions, self.order, self.back))
        return replace(self, columns=columns, positions=positions, order=order, back=back)

    @property
    def own_chunks(self) -> list[SampleChunk]:
        """This rank's, in the order of `columns`: two of every sample."""
        found = []
        for length in self.lengths:
            size = length // self.group.chunks
            mine = self.group.rank, self.group.chunks - 1 - self.group.rank
            found += [SampleChunk(chunk * size, size) for chunk in mine]
        return found

    def own(self, places: torch.Tensor) -> "OwnPlaces":
        """Return which of `places` [m] in whole rows laid flat are this rank's. The host waits for the device."""
        width, count = len(self.order), len(self.columns)
        among = self.order[places % width]
        mine = (among // count == self.group.rank).nonzero().flatten()
        return OwnPlaces(mine, (places // width * count + among % count)[mine])

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return what layers made of all positions, [b, heads, L, width], of this rank's [b, heads, l, width]; its
        gradient is the sum of those of all ranks."""
        gathered = _apply(_AllPositions, own.movedim(2, 0), self)
        return gathered.movedim(0, 2)

    def joined(self, own: torch.Tensor, places: "OwnPlaces", count: int) -> torch.Tensor:
        """Return [m, ...] of what one rank each has computed for m places, of this rank's [k, ...]; what follows is
        computed by every rank alike, so the gradient of each is its own part."""
        return _apply(_TokensJoined, own, places.mine, count, self.group)


@dataclass(frozen=True)
class OwnPlaces:
    """Those of m places in whole rows that are a rank's own."""

    mine: torch.Tensor
    """int64 [k]: which of them."""
    places: torch.Tensor
    """int64 [k]: where they are in the rank's positions of the rows laid flat."""


def context_group(layout: RankLayout, communicator: Communicator) -> ContextGroup | None:
    """Return the group of a rank; None where it has all positions of its samples."""
    if layout.context == 1:
        return None
    return ContextGroup(layout.context_rank, layout.context_group, communicator)


def padded(length: int, chunks: int) -> int:
    """Return how many positions a sample takes that is cut into so many chunks."""
    return -(-length // chunks) * chunks


def _columns(rank: int, chunks: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the places of a rank's positions in a row, sample by sample."""
    found, begin = [], 0
    for length in lengths:
        if length % chunks:
            raise ValueError(f"a sample of {length} positions is not cut into {chunks} equal chunks")
        of_sample = torch.arange(begin, begin + length).view(chunks, -1)
        found.append(of_sample[[rank, chunks - 1 - rank]].flatten())
        begin += length
    return found


class _AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, cut: ContextCut) -> torch.Tensor:
        ctx.cut, ctx.kind = cut, own.dtype
        gathered = own.new_empty(len(cut.order), *own.shape[1:])
        cut.group.communicator.all_gather(gathered, own.contiguous(), cut.group.ranks)
        return gathered.index_select(0, cut.order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        cut = ctx.cut
        by_rank = gradients[0].index_select(0, cut.back).float()
        own = by_rank.new_empty(len(cut.columns), *by_rank.shape[1:])
        cut.group.communicator.reduce_scatter_sum(own, by_rank, cut.group.ranks)
        return own.to(ctx.kind), None


class _TokensJoined(torch.autograd.Function):
    """By a sum with zeros where the others' are: exact."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, mine: torch.Tensor, count: int, group: ContextGroup) -> torch.Tensor:
        ctx.save_for_backward(mine)
        whole = own.new_zeros(count, *own.shape[1:]).index_copy(0, mine, own)
        group.communicator.all_reduce_sum(whole, group.ranks)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (mine,) = ctx.saved_tensors
        return gradients[0].index_select(0, mine), None, None, None


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result
