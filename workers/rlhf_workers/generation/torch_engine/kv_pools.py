"""Assigns samples to rows of KV pools, and divides the rows into passes of the model.

Rule: decode passes run over adjacent rows, so samples are gathered in a pool's first rows. `SinglePool` is the fast
plan: one pool grows with the longest sample. `BucketedPools` is the deterministic plan: a sample's pool, and with it
the key length of its pass, depends on its own position.
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
    """Number of rows; those beyond `slots` are padding."""
    length: int
    """Maximum number of keys that a row reads."""
    slots: Slots
    """Slot of each row, [n], n <= width."""
    rows: SampleRows | None = None
    """Rows of samples; None: row r is pool row first + r, at its sample's next position."""


@dataclass
class PoolSize:
    """The largest size of a pool, from which a new pool starts."""

    rows: int = TILE_ROWS
    capacity: int = 0


class SlottedPool:
    """A pool and the slots of its rows."""

    def __init__(
        self, capacity: int, most_rows: int, device: torch.device, retained_size: PoolSize | None = None
    ) -> None:
        """`retained_size`: the pool keeps the storage when the last sample leaves, because others have its addresses;
        it records its size here."""
        rows = TILE_ROWS if retained_size is None else retained_size.rows
        capacity = capacity if retained_size is None else max(capacity, retained_size.capacity)
        self.pool = KvPool(rows, capacity)
        self.slots: Slots = np.full(rows, EMPTY, np.int64)
        self._kept = retained_size
        self._first_capacity = capacity
        self._most_rows = padded(most_rows, TILE_ROWS)
        self._device = device

    def take_rows(self, slots: Slots) -> torch.Tensor:
        """Assign free rows [n] to `slots` and return them, after growing the pool if necessary."""
        short = len(slots) - int((self.slots == EMPTY).sum())
        if short > 0:
            more = min(max(2 * len(self.slots), padded(len(self.slots) + short, TILE_ROWS)), self._most_rows)
            self.grow(more, self.pool.capacity)
        free: Slots = np.flatnonzero(self.slots == EMPTY)[: len(slots)]
        self.slots[free] = slots
        return self.to_device(free)

    def grow(self, rows: int, capacity: int) -> None:
        """Grow the pool to at least this size."""
        self.pool.resize(rows, capacity)
        self.slots = np.pad(self.slots, (0, max(rows - len(self.slots), 0)), constant_values=EMPTY)
        if self._kept is not None:
            self._kept.rows, self._kept.capacity = self.pool.rows, self.pool.capacity

    def drop(self, slots: Slots) -> None:
        """Free the rows of these slots, if they are here; an empty pool without `retained_size` frees its storage."""
        self.slots[np.isin(self.slots, slots)] = EMPTY
        if self._kept is None and (self.slots == EMPTY).all():
            self.pool = KvPool(TILE_ROWS, self._first_capacity)
            self.slots = np.full(TILE_ROWS, EMPTY, np.int64)

    def gather(self, position: Slots) -> Slots:
        """Move samples into the first rows and return their slots [n]; `position` has an entry for every slot."""
        occupied = np.flatnonzero(self.slots != EMPTY)
        outside = occupied[occupied >= len(occupied)]
        if len(outside):
            holes = np.flatnonzero(self.slots[: len(occupied)] == EMPTY)
            keys = int(position[self.slots[outside]].max())
            self.pool.copy_rows(self.pool, self.to_device(outside), self.to_device(holes), keys)
            self.slots[holes] = self.slots[outside]
            self.slots[outside] = EMPTY
        return self.slots[: len(occupied)]

    def to_device(self, rows: Slots) -> torch.Tensor:
        """Return row numbers as an index on the pool's device."""
        return to_device(rows, self._device)


class KvPools(Protocol):
    """Storage of the samples' keys and values."""

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """Assign rows to `slots`, with the keys and values of rows `sources` of `prompts` (None: no tokens precede)."""

    def drop(self, slots: Slots) -> None:
        """Free the rows of `slots`."""

    def passes(self, position: Slots, counts: Slots | None = None) -> Iterator[DecodePass]:
        """Yield the decode passes of one step; `position` and `counts` (rows, None: one each) are per slot."""

    def reach(self, position: Slots) -> Slots:
        """Return the exclusive end [n] of positions in a pass that begins at `position` [n]."""

    def row(self, slot: int) -> tuple[KvPool, int]:
        """Return the pool and row of a sample, valid until the next change of a pool."""

    def bytes(self) -> int:
        """Return the bytes of the pools' storage."""


class SinglePool:
    """All samples in one pool."""

    def __init__(
        self, most_rows: int, largest: int, device: torch.device, retained_size: PoolSize | None = None
    ) -> None:
        """`retained_size`: see SlottedPool."""
        self._largest = largest
        self._samples = SlottedPool(bucket(1, largest), most_rows, device, retained_size)

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
        """Yield one pass over all samples, with the keys of the longest."""
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
        """See KvPools; the pool can grow up to the longest sequence."""
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
    """A pool for every key length in use."""

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
        """Yield passes of proven widths over the pools, after moving samples that outgrew theirs.

        Passes over rows of one sample follow each other.
        """
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
        """See KvPools; the end of the sample's pool, where the key length of single steps changes."""
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
        """Move samples whose next position is beyond the pool into the next pool."""
        occupied = slotted.slots[slotted.slots != EMPTY]
        outgrown = occupied[position[occupied] >= slotted.pool.capacity]
        if not len(outgrown):
            return
        target = self._pool_of(bucket(slotted.pool.capacity + 1, self._largest))
        sources = np.flatnonzero(np.isin(slotted.slots, outgrown))
        target.pool.copy_rows(slotted.pool, slotted.to_device(sources), target.take_rows(slotted.slots[sources]))
        slotted.drop(outgrown)
