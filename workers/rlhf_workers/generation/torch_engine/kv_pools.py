"""Which rows of which key-value pools hold which samples, and how they are cut into passes of the model.

Rule: a decode pass runs over the first rows of a pool, so samples are kept gathered there. Two plans: `SinglePool`
is the fast one: all samples in one pool that grows with the longest. `BucketedPools` is the deterministic one: a
sample's pool, and with it the key length of its pass, is a function of its own position, and the rows of a pass are
what `Tiles` proved. Must never let the shape of a pass depend on a neighbour in the deterministic plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS, bucket, padded
from rlhf_workers.generation.torch_engine.kv_cache import KvPool, PromptCache
from rlhf_workers.generation.torch_engine.response_table import Slots
from rlhf_workers.generation.torch_engine.sample_rows import SampleRows, sample_rows
from rlhf_workers.generation.torch_engine.tiles import Tiles

EMPTY: Final = -1


class DecodePass(NamedTuple):
    """One decode pass."""

    pool: KvPool
    first: int
    width: int
    """Rows; those beyond `slots` are padding."""
    length: int
    """Keys read."""
    slots: Slots
    """[n] n <= width: slot of each row."""
    rows: SampleRows | None = None
    """None: row r is row first + r of the pool, at its sample's next position."""


@dataclass
class PoolSize:
    """The largest that a pool was; one that is made anew begins at it."""

    rows: int = TILE_ROWS
    capacity: int = 0


class SlottedPool:
    """A pool and the slots of its rows."""

    def __init__(self, capacity: int, most_rows: int, device: torch.device, kept: PoolSize | None = None) -> None:
        """`kept`: the storage stays when the last sample leaves, for what knows its addresses, and remembers its size
        there."""
        rows = TILE_ROWS if kept is None else kept.rows
        capacity = capacity if kept is None else max(capacity, kept.capacity)
        self.pool = KvPool(rows, capacity)
        self.slots: Slots = np.full(rows, EMPTY, np.int64)
        self._kept = kept
        self._first_capacity = capacity
        self._most_rows = padded(most_rows, TILE_ROWS)
        self._device = device

    def take_rows(self, slots: Slots) -> torch.Tensor:
        """Free rows [n] for `slots`, the pool grown where needed."""
        short = len(slots) - int((self.slots == EMPTY).sum())
        if short > 0:
            more = min(max(2 * len(self.slots), padded(len(self.slots) + short, TILE_ROWS)), self._most_rows)
            self.grow(more, self.pool.capacity)
        free: Slots = np.flatnonzero(self.slots == EMPTY)[: len(slots)]
        self.slots[free] = slots
        return self.to_device(free)

    def grow(self, rows: int, capacity: int) -> None:
        """Makes the pool at least this large."""
        self.pool.resize(rows, capacity)
        self.slots = np.pad(self.slots, (0, max(rows - len(self.slots), 0)), constant_values=EMPTY)
        if self._kept is not None:
            self._kept.rows, self._kept.capacity = self.pool.rows, self.pool.capacity

    def drop(self, slots: Slots) -> None:
        """Frees the rows of these slots, where they are here."""
        self.slots[np.isin(self.slots, slots)] = EMPTY
        if self._kept is None and (self.slots == EMPTY).all():
            self.pool = KvPool(TILE_ROWS, self._first_capacity)
            self.slots = np.full(TILE_ROWS, EMPTY, np.int64)

    def gather(self, position: Slots) -> Slots:
        """Moves samples, whose `position` is that of every slot, into the first rows; returns their slots [n]."""
        held = np.flatnonzero(self.slots != EMPTY)
        outside = held[held >= len(held)]
        if len(outside):
            holes = np.flatnonzero(self.slots[: len(held)] == EMPTY)
            keys = int(position[self.slots[outside]].max())
            self.pool.copy_rows(self.pool, self.to_device(outside), self.to_device(holes), keys)
            self.slots[holes] = self.slots[outside]
            self.slots[outside] = EMPTY
        return self.slots[: len(held)]

    def to_device(self, rows: Slots) -> torch.Tensor:
        """Row numbers as an index on the pool's device."""
        return to_device(rows, self._device)


class KvPools(Protocol):
    """Where samples live between steps."""

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """Gives `slots` rows, with the keys and values of rows `sources` of `prompts` (None: nothing comes before)."""

    def drop(self, slots: Slots) -> None:
        """Frees the rows of `slots`."""

    def passes(self, position: Slots, counts: Slots | None = None) -> Iterator[DecodePass]:
        """The decode passes of one step; `position` is that of every slot, and so is how many rows it has (None: one
        each)."""

    def reach(self, position: Slots) -> Slots:
        """Return the position [n] that no row of a pass which begins at `position` [n] may have any more."""

    def row(self, slot: int) -> tuple[KvPool, int]:
        """Where a sample's keys and values are until the next change of a pool."""

    def bytes(self) -> int:
        """Memory of the pools."""


class SinglePool:
    """All samples in one pool."""

    def __init__(self, most_rows: int, largest: int, device: torch.device, kept: PoolSize | None = None) -> None:
        """`kept`: see SlottedPool."""
        self._largest = largest
        self._samples = SlottedPool(bucket(1, largest), most_rows, device, kept)

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """See KvPools."""
        self._reach(int(positions.max()) + 1)
        rows = self._samples.take_rows(slots)
        if prompts is not None:
            self._samples.pool.write_prompts(prompts, self._samples.to_device(sources), rows)

    def drop(self, slots: Slots) -> None:
        """See KvPools."""
        self._samples.drop(slots)

    def passes(self, position: Slots, counts: Slots | None = None) -> Iterator[DecodePass]:
        """Yield one pass over all samples, over as many keys as the longest has."""
        slots = self._samples.gather(position)
        if not len(slots):
            return
        longest = int((position[slots] + (1 if counts is None else counts[slots])).max())
        self._reach(longest)
        length = min(padded(longest), self._samples.pool.capacity)
        if counts is None:
            yield DecodePass(self._samples.pool, 0, len(slots), length, slots)
        else:
            rows = sample_rows(counts[slots])
            yield DecodePass(self._samples.pool, 0, len(rows.pool), length, slots[rows.pool], rows)

    def reach(self, position: Slots) -> Slots:
        """See KvPools: the pool grows as long as a sample may become."""
        return np.full_like(position, self._largest)

    def row(self, slot: int) -> tuple[KvPool, int]:
        """See KvPools."""
        return self._samples.pool, int(np.flatnonzero(self._samples.slots == slot)[0])

    def bytes(self) -> int:
        """See KvPools."""
        return self._samples.pool.bytes()

    def _reach(self, length: int) -> None:
        if length > self._samples.pool.capacity:
            self._samples.grow(len(self._samples.slots), bucket(length, self._largest))


class BucketedPools:
    """A pool for every key length."""

    def __init__(self, most_rows: int, largest: int, device: torch.device, tiles: Tiles) -> None:
        self._most_rows = most_rows
        self._largest = largest
        self._device = device
        self._tiles = tiles
        self._pools: dict[int, SlottedPool] = {}

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """See KvPools."""
        capacities = np.array([bucket(int(position) + 1, self._largest) for position in positions])
        for capacity in np.unique(capacities):
            fitting = capacities == capacity
            slotted = self._pool_of(int(capacity))
            rows = slotted.take_rows(slots[fitting])
            if prompts is not None:
                slotted.pool.write_prompts(prompts, slotted.to_device(sources[fitting]), rows)

    def drop(self, slots: Slots) -> None:
        """See KvPools."""
        for slotted in self._pools.values():
            slotted.drop(slots)

    def passes(self, position: Slots, counts: Slots | None = None) -> Iterator[DecodePass]:
        """Yield passes of proven widths over every pool, samples that outgrew theirs moved first. Passes over rows of
        one sample follow each other, so that what one writes the next one reads."""
        for capacity in sorted(self._pools):
            self._promote(self._pools[capacity], position)
        for capacity in sorted(self._pools):
            slotted = self._pools[capacity]
            slots = slotted.gather(position)
            if counts is not None and (counts[slots] > 1).any():
                yield from self._passes_of_several(slotted.pool, slots, counts[slots])
                continue
            for first, width in self._tiles.widths(len(slots), capacity):
                yield DecodePass(slotted.pool, first, width, capacity, slots[first : first + width])

    def reach(self, position: Slots) -> Slots:
        """See KvPools: the end of the pool that a sample is in, where the key length of single steps changes."""
        return np.array([bucket(int(at) + 1, self._largest) for at in position], np.int64)

    def row(self, slot: int) -> tuple[KvPool, int]:
        """See KvPools."""
        rows = ((slotted, np.flatnonzero(slotted.slots == slot)) for slotted in self._pools.values())
        return next((slotted.pool, int(row[0])) for slotted, row in rows if len(row))

    def bytes(self) -> int:
        """See KvPools."""
        return sum(slotted.pool.bytes() for slotted in self._pools.values())

    def _passes_of_several(self, pool: KvPool, slots: Slots, counts: Slots) -> Iterator[DecodePass]:
        rows = sample_rows(counts)
        for first, width in self._tiles.widths(len(rows.pool), pool.capacity, several=True):
            part = slice(first, first + width)
            own = SampleRows(rows.pool[part], rows.ahead[part])
            yield DecodePass(pool, 0, width, pool.capacity, slots[own.pool], own)

    def _pool_of(self, capacity: int) -> SlottedPool:
        if capacity not in self._pools:
            self._pools[capacity] = SlottedPool(capacity, self._most_rows, self._device)
        return self._pools[capacity]

    def _promote(self, slotted: SlottedPool, position: Slots) -> None:
        """Moves samples whose next position lies beyond the pool into the next one."""
        held = slotted.slots[slotted.slots != EMPTY]
        outgrown = held[position[held] >= slotted.pool.capacity]
        if not len(outgrown):
            return
        target = self._pool_of(bucket(slotted.pool.capacity + 1, self._largest))
        sources = np.flatnonzero(np.isin(slotted.slots, outgrown))
        target.pool.copy_rows(slotted.pool, slotted.to_device(sources), target.take_rows(slotted.slots[sources]))
        slotted.drop(outgrown)
