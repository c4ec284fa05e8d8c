"""Assigns samples to packed micro-batches, without splitting a sample.

Owns the split of a mini-batch with `spec.training.packing`. Rule: it depends only on the arguments, so ranks and
replays compute the same.
"""

import heapq
from collections.abc import Sequence

from rlhf_workers.training.batches.minibatches import shared_out, units_of


def packed_split(
    samples: Sequence[int],
    lengths: Sequence[int],
    replicas: int,
    microbatches: int,
    together: int,
    most_tokens: int | None,
) -> list[list[list[int]]]:
    """Return [replica][micro-batch] -> samples of one mini-batch, with at most `most_tokens` tokens each (None: no
    limit).

    All replicas have the same number of micro-batches: at least `microbatches`. No micro-batch has more samples than
    with `microbatches`. A longer run of `together` samples raises the limit to its tokens. Raises ValueError like
    `minibatches.split`.
    """
    units = units_of(samples, replicas, microbatches, together)
    most_units = len(units) // (replicas * microbatches)
    tokens = {unit[0]: sum(lengths[sample] for sample in unit) for unit in units}
    ranked = sorted(units, key=lambda unit: (-tokens[unit[0]], unit[0]))
    sizes = [tokens[unit[0]] for unit in ranked]
    total = sum(sizes)
    bound = total if most_tokens is None else max(most_tokens, sizes[0])
    fewest = max(replicas * microbatches, -(-total // bound))
    for count in range(-(-fewest // replicas) * replicas, len(units) + 1, replicas):
        cells = _balanced(sizes, count, most_units)
        loads = [sum(sizes[place] for place in cell) for cell in cells]
        if max(loads) <= bound:
            break
    order = sorted(range(len(cells)), key=lambda cell: (-loads[cell], cells[cell][0]))
    splits = [[sample for place in cells[cell] for sample in ranked[place]] for cell in order]
    return shared_out(splits, [loads[cell] for cell in order], replicas)


def _balanced(sizes: Sequence[int], count: int, most: int) -> list[list[int]]:
    """Return the indices of descending `sizes` in `count` cells of at most `most` entries."""
    cells: list[list[int]] = [[] for _ in range(count)]
    open_cells = [(0, cell) for cell in range(count)]
    for place, size in enumerate(sizes):
        load, cell = heapq.heappop(open_cells)
        cells[cell].append(place)
        if len(cells[cell]) < most:
            heapq.heappush(open_cells, (load + size, cell))
    return cells
