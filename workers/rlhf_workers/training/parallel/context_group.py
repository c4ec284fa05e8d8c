"""The ranks that share each sample by position, the positions of each, and the communication between them.

Owns context parallelism's cut of a micro-batch. Each sample is padded to a multiple of twice the number of ranks and
cut into that many equal chunks. A rank has one from the front and its mirror image from the back.

Rule: every rank of the group makes the same calls in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch

from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout

CHUNKS_A_RANK: Final = 2
"""Chunks per rank: one from the front of a sample and its mirror image from the back."""


@dataclass(frozen=True)
class ContextGroup:
    """A rank's place in its group, with the communicator."""

    rank: int
    """Number of this rank in the group."""
    ranks: tuple[int, ...]
    """Global ranks in order of their number."""
    communicator: Communicator

    @property
    def chunks(self) -> int:
        """Chunks per sample; its padded length is a multiple of them."""
        return CHUNKS_A_RANK * len(self.ranks)


@dataclass(frozen=True)
class SampleChunk:
    """Consecutive positions of one sample that a rank computes."""

    start: int
    """Position of the first one in the sample."""
    length: int


@dataclass(frozen=True)
class ContextCut:
    """A rank's part of the rows of a micro-batch, all of which are cut alike."""

    group: ContextGroup
    lengths: tuple[int, ...]
    """Positions of each sample of a row, in order; for padded rows the length of a row."""
    columns: torch.Tensor
    """int64 [l]: indices in a row of this rank's positions, sample by sample, ascending."""
    positions: torch.Tensor
    """int64 [l]: positions of `columns` in their samples."""
    order: torch.Tensor
    """int64 [L]: index of each position of a row among the concatenated positions of all ranks."""
    back: torch.Tensor
    """int64 [L]: the inverse permutation of `order`: indices in a row."""

    @classmethod
    def for_lengths(cls, group: ContextGroup, lengths: Sequence[int]) -> "ContextCut":
        """Return the cut of rows with samples of these padded lengths, on the CPU. Raises ValueError if one is no
        multiple of the chunks."""
        by_rank = [_columns(rank, group.chunks, lengths) for rank in range(len(group.ranks))]
        back = torch.cat([torch.cat(parts) for parts in by_rank])
        starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        own = [part - start for part, start in zip(by_rank[group.rank], starts, strict=True)]
        columns = torch.cat(by_rank[group.rank])
        return cls(group, tuple(lengths), columns, torch.cat(own), back.argsort(), back)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "ContextCut":
        """Return it with `move` applied to every tensor."""
        columns, positions, order, back = map(move, (self.columns, self.positions, self.order, self.back))
        return replace(self, columns=columns, positions=positions, order=order, back=back)

    @property
    def own_chunks(self) -> list[SampleChunk]:
        """This rank's chunks in the order of `columns`, two per sample."""
        found = []
        for length in self.lengths:
            size = length // self.group.chunks
            mine = self.group.rank, self.group.chunks - 1 - self.group.rank
            found += [SampleChunk(chunk * size, size) for chunk in mine]
        return found

    def own(self, places: torch.Tensor) -> "OwnPlaces":
        """Return which of `places` [m] in flattened whole rows are on this rank."""
        width, count = len(self.order), len(self.columns)
        among = self.order[places % width]
        mine = (among // count == self.group.rank).nonzero().flatten()
        return OwnPlaces(mine, (places // width * count + among % count)[mine])

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return a layer's results at all positions, [b, heads, L, width], from this rank's [b, heads, l, width]. Its
        gradient is the sum over all ranks."""
        gathered = _apply(_AllPositions, own.movedim(2, 0), self)
        return gathered.movedim(0, 2)

    def joined(self, own: torch.Tensor, places: "OwnPlaces", count: int) -> torch.Tensor:
        """Return [m, ...] for m places, each computed by one rank, from this rank's [k, ...]. The gradient of each is
        its own part.
        """
        return _apply(_TokensJoined, own, places.mine, count, self.group)


@dataclass(frozen=True)
class OwnPlaces:
    """The ones of m places in whole rows that are on this rank."""

    mine: torch.Tensor
    """int64 [k]: their indices among the m places."""
    places: torch.Tensor
    """int64 [k]: their indices in the rank's positions of the flattened rows."""


def context_group(layout: RankLayout, communicator: Communicator) -> ContextGroup | None:
    """Return the group of a rank; None if it has all positions of its samples."""
    if layout.context == 1:
        return None
    return ContextGroup(layout.context_rank, layout.context_group, communicator)


def padded(length: int, chunks: int) -> int:
    """Return the padded length of a sample that is cut into `chunks` chunks."""
    return -(-length // chunks) * chunks


def _columns(rank: int, chunks: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the indices of a rank's positions in a row, sample by sample."""
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
    """Joins tokens by a sum with zeros for those of other ranks, which is exact."""

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
