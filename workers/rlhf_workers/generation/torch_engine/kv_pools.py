"""Which rows of which key-value pools hold which samples, and how they are cut into passes of the model.

Rule: a decode pass runs over the first rows of a pool, so samples are kept gathered there. Two plans: `SinglePool`
is the fast one: all samples in one pool that grows with the longest. `BucketedPools` is the deterministic one: a
sample's pool, and with it the key length of its pass, is a function of its own position, and the rows of a pass are
what `Tiles` proved. Must never let the shape of a pass depend on a neighbour in the deterministic plan.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from rlhf_workers.generation.torch_engine.kv_cache import TILE_ROWS, KvPool, PromptCache
from rlhf_workers.generation.torch_engine.response_table import Slots
from rlhf_workers.generation.torch_engine.tiles import Tiles

FIRST_CAPACITY: Final = 64
"""Key length of the smallest pool; the next ones double."""
KEY_STEP: Final = 16
"""Key lengths are multiples of this, so that rows of keys stay aligned."""
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


def padded(length: int, step: int = KEY_STEP) -> int:
    """`length` rounded up to a multiple of `step`."""
    return -(-length // step) * step


def bucket(length: int, largest: int) -> int:
    """Smallest of 64, 128, 256, ... that holds `length` keys, at most `largest`."""
    size = FIRST_CAPACITY
    while size < length:
        size *= 2
    return min(size, largest)


class SlottedPool:
    """A pool and the slots of its rows."""

    def __init__(self, capacity: int, most_rows: int, device: torch.device) -> None:
        self.pool = KvPool(TILE_ROWS, capacity)
        self.slots: Slots = _no_slots()
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

    def drop(self, slots: Slots) -> None:
        """Frees the rows of these slots, where they are here."""
        self.slots[np.isin(self.slots, slots)] = EMPTY
        if (self.slots == EMPTY).all():
            self.pool = KvPool(TILE_ROWS, self._first_capacity)
            self.slots = _no_slots()

    def gather(self) -> Slots:
        """Moves samples into the first rows; returns their slots [n]."""
        held = np.flatnonzero(self.slots != EMPTY)
        outside = held[held >= len(held)]
        if len(outside):
            holes = np.flatnonzero(self.slots[: len(held)] == EMPTY)
            self.pool.copy_rows(self.pool, self.to_device(outside), self.to_device(holes))
            self.slots[holes] = self.slots[outside]
            self.slots[outside] = EMPTY
        return self.slots[: len(held)]

    def to_device(self, rows: Slots) -> torch.Tensor:
        """Row numbers as an index on the pool's device."""
        return torch.from_numpy(rows).to(self._device)


def _no_slots() -> Slots:
    return np.full(TILE_ROWS, EMPTY, np.int64)


class KvPools(Protocol):
    """Where samples live between steps."""

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """Gives `slots` rows, with the keys and values of rows `sources` of `prompts` (None: nothing comes before)."""

    def drop(self, slots: Slots) -> None:
        """Frees the rows of `slots`."""

    def passes(self, position: Slots) -> Iterator[DecodePass]:
        """The decode passes of one step; `position` is that of every slot."""

    def row(self, slot: int) -> tuple[KvPool, int]:
        """Where a sample's keys and values are until the next change of a pool."""

    def bytes(self) -> int:
        """Memory of the pools."""


class SinglePool:
    """All samples in one pool."""

    def __init__(self, most_rows: int, largest: int, device: torch.device) -> None:
        self._largest = largest
        self._samples = SlottedPool(bucket(1, largest), most_rows, device)

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """See KvPools."""
        self._reach(int(positions.max()) + 1)
        rows = self._samples.take_rows(slots)
        if prompts is not None:
            self._samples.pool.write_prompts(prompts, self._samples.to_device(sources), rows)

    def drop(self, slots: Slots) -> None:
        """See KvPools."""
        self._samples.drop(slots)

    def passes(self, position: Slots) -> Iterator[DecodePass]:
        """Yield one pass over all samples, over as many keys as the longest has."""
        slots = self._samples.gather()
        if len(slots):
            longest = int(position[slots].max()) + 1
            self._reach(longest)
            yield DecodePass(
                self._samples.pool, 0, len(slots), min(padded(longest), self._samples.pool.capacity), slots
            )

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

    def passes(self, position: Slots) -> Iterator[DecodePass]:
        """Yield passes of proven widths over every pool, samples that outgrew theirs moved first."""
        for capacity in sorted(self._pools):
            self._promote(self._pools[capacity], position)
        for capacity in sorted(self._pools):
            slotted = self._pools[capacity]
            slots = slotted.gather()
            for first, width in self._tiles.widths(len(slots), capacity):
                yield DecodePass(slotted.pool, first, width, capacity, slots[first : first + width])

    def row(self, slot: int) -> tuple[KvPool, int]:
        """See KvPools."""
        rows = ((slotted, np.flatnonzero(slotted.slots == slot)) for slotted in self._pools.values())
        return next((slotted.pool, int(row[0])) for slotted, row in rows if len(row))

    def bytes(self) -> int:
        """See KvPools."""
        return sum(slotted.pool.bytes() for slotted in self._pools.values())

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
