"""Assigns samples to packed micro-batches whose rows compute a shared prompt once.

Owns the split of a mini-batch with `spec.training.sharedPrompts`. Rule: it depends only on the arguments, so ranks and
replays compute the same. Samples with one prompt share a micro-batch as far as limits and balance allow.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_workers.training.batches.minibatches import shared_out, units_of
from rlhf_workers.training.batches.packed_rows import PromptTable, packed_row


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together."""

    samples: tuple[int, ...]
    prompt: int
    """Number of their prompt; minus one less the first sample if they have several."""
    head: int
    """Tokens of their prompt, which other units may share; 0 if they have several."""
    body: int
    """Tokens of the samples without their prompt; all of them if they have several prompts."""


@dataclass(frozen=True)
class _SharedPart:
    """Units with one prompt that share a micro-batch."""

    units: tuple[_Unit, ...]

    @property
    def tokens(self) -> int:
        return self.units[0].head + sum(unit.body for unit in self.units)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the most tokens first, then the first sample."""
        return -self.tokens, self.units[0].samples[0]


def shared_split(
    samples: Sequence[int],
    lengths: Sequence[int],
    prompts: PromptTable,
    replicas: int,
    microbatches: int,
    together: int,
    most_tokens: int | None,
) -> list[list[list[int]]]:
    """Return [replica][micro-batch] -> samples of one mini-batch, with the limits of `packed_split`, where the tokens
    of a micro-batch count a shared prompt once.

    Samples of a micro-batch with one prompt are neighbours. Raises ValueError like `minibatches.split`.
    """
    runs = units_of(samples, replicas, microbatches, together)
    units = [_unit(run, lengths, prompts) for run in runs]
    most_units = len(units) // (replicas * microbatches)
    longest, total = max(unit.head + unit.body for unit in units), sum(unit.head + unit.body for unit in units)
    bound = total if most_tokens is None else max(most_tokens, longest)
    parts = _parts(units, bound, most_units)
    fewest = max(replicas * microbatches, -(-sum(part.tokens for part in parts) // bound))
    for count in range(-(-fewest // replicas) * replicas, len(units) + 1, replicas):
        cells = [_neighbours(cell) for cell in _balanced(_at_least(parts, count), count, most_units)]
        loads = [sum(segment.tokens for segment in packed_row(cell, lengths, prompts)) for cell in cells]
        if max(loads) <= bound:
            break
    order = sorted(range(len(cells)), key=lambda cell: (-loads[cell], cells[cell][0]))
    return shared_out([cells[cell] for cell in order], [loads[cell] for cell in order], replicas)


def _unit(run: Sequence[int], lengths: Sequence[int], prompts: PromptTable) -> _Unit:
    numbers, whole = {prompts.numbers[sample] for sample in run}, sum(lengths[sample] for sample in run)
    if len(numbers) > 1:
        return _Unit(tuple(run), -1 - run[0], 0, whole)
    head = prompts.lengths[run[0]]
    return _Unit(tuple(run), numbers.pop(), head, whole - head * len(run))


def _parts(units: Sequence[_Unit], bound: int, most: int) -> list[_SharedPart]:
    """Return the units of each prompt, longest first, in parts of at most `bound` tokens and `most` units."""
    by_prompt: dict[int, list[_Unit]] = {}
    for unit in units:
        by_prompt.setdefault(unit.prompt, []).append(unit)
    parts = list[_SharedPart]()
    for family in by_prompt.values():
        part, tokens = list[_Unit](), 0
        for unit in sorted(family, key=lambda unit: (-unit.body, unit.samples[0])):
            if part and (len(part) == most or tokens + unit.body > bound):
                parts.append(_SharedPart(tuple(part)))
                part = []
            tokens = unit.body + (tokens if part else unit.head)
            part.append(unit)
        parts.append(_SharedPart(tuple(part)))
    return parts


def _at_least(parts: Sequence[_SharedPart], count: int) -> list[_SharedPart]:
    """Return at least `count` parts: those with the most units are halved, long and short units alternately."""
    heap = [(-len(part.units), part.order, part) for part in parts]
    heapq.heapify(heap)
    while len(heap) < count:
        units = heapq.heappop(heap)[-1].units
        for half in (_SharedPart(units[::2]), _SharedPart(units[1::2])):
            heapq.heappush(heap, (-len(half.units), half.order, half))
    return [part for _, _, part in heap]


def _balanced(parts: Sequence[_SharedPart], count: int, most: int) -> list[list[_SharedPart]]:
    """Return the parts in `count` cells of at most `most` units.

    The part with the most tokens goes first, to the cell with the fewest that has room for it. If none has, the
    roomiest cell takes as much as it can.
    """
    cells: list[list[_SharedPart]] = [[] for _ in range(count)]
    room = [most] * count
    open_cells = [(0, cell) for cell in range(count)]
    waiting = [(part.order, part) for part in parts]
    heapq.heapify(waiting)
    while waiting:
        part = heapq.heappop(waiting)[-1]
        passed = list[tuple[int, int]]()
        while open_cells and room[open_cells[0][1]] < len(part.units):
            passed.append(heapq.heappop(open_cells))
        if open_cells:
            load, cell = heapq.heappop(open_cells)
        else:
            load, cell = max(passed, key=lambda entry: (room[entry[1]], -entry[0], -entry[1]))
            passed.remove((load, cell))
            rest = _SharedPart(part.units[room[cell] :])
            heapq.heappush(waiting, (rest.order, rest))
            part = _SharedPart(part.units[: room[cell]])
        cells[cell].append(part)
        room[cell] -= len(part.units)
        if room[cell]:
            heapq.heappush(open_cells, (load + part.tokens, cell))
        for entry in passed:
            heapq.heappush(open_cells, entry)
    return cells


def _neighbours(cell: Sequence[_SharedPart]) -> list[int]:
    """Return the samples of a cell, those with one prompt next to each other."""
    by_prompt: dict[int, list[int]] = {}
    for part in cell:
        for unit in part.units:
            by_prompt.setdefault(unit.prompt, []).extend(unit.samples)
    return [sample for family in by_prompt.values() for sample in family]
