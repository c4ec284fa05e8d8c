"""Micro-batches with a limit of padded tokens: their number in a mini-batch, and the samples of each.

Owns the split for `spec.training.microBatchTokens`, except that of packed micro-batches. Rule: it depends only on the
arguments, so ranks and replays compute the same. If the split of `minibatches` is within the limit, it is used
unchanged. Must never separate samples that stay together, nor leave a micro-batch empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_workers.training.batches.minibatches import shared_out, split
from rlhf_workers.training.batches.packed_batches import packed_split
from rlhf_workers.training.batches.packed_rows import PackedRow, PromptTable, packed_row
from rlhf_workers.training.batches.shared_batches import shared_split
from rlhf_workers.training.parallel.context_group import CHUNKS_A_RANK, padded
from rlhf_workers.training.parallel.rank_layout import RankLayout

RUN_SHARE: Final = 1 / 16
"""Fixed cost of a micro-batch as a share of the limit, so that an additional one must save as much padding."""
Split = list[list[list[int]]]
"""[replica][micro-batch] -> samples."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of one mini-batch, and the layout whose table runs that number."""

    layout: RankLayout
    samples: list[int]
    splits: Mapping[str, Split]
    """Model role -> micro-batches of all its replicas."""
    packed: bool = False
    """Whether micro-batches are packed, without padding to the longest sample."""
    prompts: PromptTable | None = None
    """Prompts that neighbours in a packed micro-batch share; None: every sample has its own."""

    def row(self, cell: Sequence[int], lengths: Sequence[int]) -> PackedRow:
        """Return the row of one of its packed micro-batches."""
        return packed_row(cell, lengths, self.prompts)

    def tokens(self, cell: Sequence[int], lengths: Sequence[int]) -> int:
        """Return the computed tokens of one of its micro-batches, with padding."""
        if self.prompts is not None:
            return sum(segment.tokens for segment in self.row(cell, lengths))
        chunks = CHUNKS_A_RANK * self.layout.context if self.layout.context > 1 else 1
        sizes = [padded(lengths[sample], chunks) for sample in cell]
        return sum(sizes) if self.packed else len(sizes) * max(sizes)


def split_minibatch(
    layout: RankLayout,
    samples: list[int],
    lengths: Sequence[int],
    together: int,
    most_tokens: int | None,
    packed: bool = False,
    prompts: PromptTable | None = None,
) -> MicroBatchPlan:
    """Return the micro-batches of one mini-batch with at most `most_tokens` tokens each (None: no limit), and a layout
    whose table runs that number. Padding to the longest sample counts, that for a context group does not.

    A longer unit of `together` samples raises the limit to its tokens. `prompts`: packed micro-batches share equal
    ones; None: every sample has its own.
    """
    splits: dict[str, Split] = {}
    by_shape: dict[tuple[int, int], Split] = {}  # models of the same shape share one
    for model in layout.models:
        shape = layout.replicas(model), layout.microbatches(model)
        if shape not in by_shape and packed and prompts is not None:
            by_shape[shape] = shared_split(samples, lengths, prompts, *shape, together, most_tokens)
        elif shape not in by_shape and packed:
            by_shape[shape] = packed_split(samples, lengths, *shape, together, most_tokens)
        elif shape not in by_shape:
            by_shape[shape] = split(samples, lengths, *shape, together)
            if most_tokens is not None:
                by_shape[shape] = bounded(by_shape[shape], lengths, together, most_tokens)
        splits[model] = by_shape[shape]
    counts = {model: len(cells[0]) for model, cells in splits.items()}
    return MicroBatchPlan(layout.with_microbatches(counts), samples, splits, packed, prompts if packed else None)


def bounded(unbounded: Split, lengths: Sequence[int], together: int, most_tokens: int) -> Split:
    """Return a split unchanged if it is within the limit, otherwise another one.

    Its replicas have the same number of micro-batches, none with more samples than those of `unbounded`.
    """
    if all(padded_tokens(cell, lengths) <= most_tokens for replica in unbounded for cell in replica):
        return unbounded
    replicas, most_units = len(unbounded), len(unbounded[0][0]) // together
    units = [
        cell[start : start + together] for row in unbounded for cell in row for start in range(0, len(cell), together)
    ]
    longest = {unit[0]: max(lengths[sample] for sample in unit) for unit in units}
    ranked = sorted(units, key=lambda unit: (-longest[unit[0]], unit[0]))
    tokens = [longest[unit[0]] * together for unit in ranked]
    runs = _runs(tokens, max(most_tokens, tokens[0]), most_units, replicas)
    runs.sort(key=lambda run: (-tokens[run.start] * len(run), run.start))
    cells = [[sample for place in run for sample in ranked[place]] for run in runs]
    return shared_out(cells, [tokens[run.start] * len(run) for run in runs], replicas)


def padded_tokens(cell: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch, with each sample padded to the longest."""
    return len(cell) * max(lengths[sample] for sample in cell)


def _runs(tokens: Sequence[int], bound: int, most_units: int, replicas: int) -> list[range]:
    """Return consecutive runs of units within the limits, at the lowest cost: padded tokens, and RUN_SHARE of the limit
    for each run. The largest are then halved until their number is a multiple of `replicas`.

    `tokens` of the units descend: the first of a run sets the width of all.
    """
    units, price = len(tokens), RUN_SHARE * bound
    least, origin = np.full(units + 1, np.inf), np.zeros(units + 1, np.int64)
    least[0] = 0.0  # least cost of the first n units; that of later ones follows from the runs before them
    for start in range(units):
        count = min(units - start, most_units, max(1, bound // tokens[start]))
        stops = slice(start + 1, start + 1 + count)
        costs = least[start] + price + tokens[start] * np.arange(1, count + 1)
        better = costs < least[stops]
        least[stops][better], origin[stops][better] = costs[better], start
    runs, stop = list[range](), units
    while stop:
        runs.append(range(int(origin[stop]), stop))
        stop = runs[-1].start
    while len(runs) % replicas:
        sizes = [tokens[run.start] * len(run) if len(run) > 1 else 0 for run in runs]
        run = runs.pop(sizes.index(max(sizes)))
        middle = (run.start + run.stop) // 2
        runs += [range(run.start, middle), range(middle, run.stop)]
    return runs
