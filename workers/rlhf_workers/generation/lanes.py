"""Which rows of which key-value pools hold which samples, and how they are cut into passes of the model.

Rule: a decode pass runs over the first rows of a lane, so samples are kept gathered there. Two plans: `OneLane`
is the fast one: all samples in one pool that grows with the longest. `BucketLanes` is the deterministic one: a sample's
lane, and with it the key length of its pass, is a function of its own position, and the rows of a pass are what `Tiles`
proved. Must never let the shape of a pass depend on a neighbour in the deterministic plan.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from rlhf_workers.generation.kv_cache import TILE_ROWS, KvPool, PromptCache
from rlhf_workers.generation.response_table import Slots
from rlhf_workers.generation.tiles import Tiles

FIRST_CAPACITY: Final = 64
"""Key length of the smallest pool; the next ones double."""
KEY_STEP: Final = 16
"""Key lengths are multiples of this, so that rows of keys stay aligned."""
EMPTY: Final = -1


class Pass(NamedTuple):
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


class Lane:
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


class Lanes(Protocol):
    """Where samples live between steps."""

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """Gives `slots` rows, with the keys and values of rows `sources` of `prompts` (None: nothing comes before)."""

    def drop(self, slots: Slots) -> None:
        """Frees the rows of `slots`."""

    def passes(self, position: Slots) -> Iterator[Pass]:
        """The decode passes of one step; `position` is that of every slot."""

    def row(self, slot: int) -> tuple[KvPool, int]:
        """Where a sample's keys and values are until the next change of a lane."""

    def bytes(self) -> int:
        """Memory of the pools."""


class OneLane:
    """All samples in one pool."""

    def __init__(self, most_rows: int, largest: int, device: torch.device) -> None:
        self._largest = largest
        self._lane = Lane(bucket(1, largest), most_rows, device)

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """See Lanes."""
        self._reach(int(positions.max()) + 1)
        rows = self._lane.take_rows(slots)
        if prompts is not None:
            self._lane.pool.write_prompts(prompts, self._lane.to_device(sources), rows)

    def drop(self, slots: Slots) -> None:
        """See Lanes."""
        self._lane.drop(slots)

    def passes(self, position: Slots) -> Iterator[Pass]:
        """One pass over all samples, over as many keys as the longest has."""
        slots = self._lane.gather()
        if len(slots):
            longest = int(position[slots].max()) + 1
            self._reach(longest)
            yield Pass(self._lane.pool, 0, len(slots), min(padded(longest), self._lane.pool.capacity), slots)

    def row(self, slot: int) -> tuple[KvPool, int]:
        """See Lanes."""
        return self._lane.pool, int(np.flatnonzero(self._lane.slots == slot)[0])

    def bytes(self) -> int:
        """See Lanes."""
        return self._lane.pool.bytes()

    def _reach(self, length: int) -> None:
        if length > self._lane.pool.capacity:
            self._lane.grow(len(self._lane.slots), bucket(length, self._largest))


class BucketLanes:
    """A lane for every key length."""

    def __init__(self, most_rows: int, largest: int, device: torch.device, tiles: Tiles) -> None:
        self._most_rows = most_rows
        self._largest = largest
        self._device = device
        self._tiles = tiles
        self._lanes: dict[int, Lane] = {}

    def place(self, slots: Slots, positions: Slots, prompts: PromptCache | None, sources: Slots) -> None:
        """See Lanes."""
        capacities = np.array([bucket(int(position) + 1, self._largest) for position in positions])
        for capacity in np.unique(capacities):
            here = capacities == capacity
            lane = self._lane(int(capacity))
            rows = lane.take_rows(slots[here])
            if prompts is not None:
                lane.pool.write_prompts(prompts, lane.to_device(sources[here]), rows)

    def drop(self, slots: Slots) -> None:
        """See Lanes."""
        for lane in self._lanes.values():
            lane.drop(slots)

    def passes(self, position: Slots) -> Iterator[Pass]:
        """Proven widths over every lane, samples that outgrew theirs moved first."""
        for capacity in sorted(self._lanes):
            self._promote(self._lanes[capacity], position)
        for capacity in sorted(self._lanes):
            lane = self._lanes[capacity]
            slots = lane.gather()
            for first, width in self._tiles.widths(len(slots), capacity):
                yield Pass(lane.pool, first, width, capacity, slots[first : first + width])

    def row(self, slot: int) -> tuple[KvPool, int]:
        """See Lanes."""
        found = ((lane, np.flatnonzero(lane.slots == slot)) for lane in self._lanes.values())
        return next((lane.pool, int(rows[0])) for lane, rows in found if len(rows))

    def bytes(self) -> int:
        """See Lanes."""
        return sum(lane.pool.bytes() for lane in self._lanes.values())

    def _lane(self, capacity: int) -> Lane:
        if capacity not in self._lanes:
            self._lanes[capacity] = Lane(capacity, self._most_rows, self._device)
        return self._lanes[capacity]

    def _promote(self, lane: Lane, position: Slots) -> None:
        """Moves samples whose next position lies beyond the lane into the next one."""
        held = lane.slots[lane.slots != EMPTY]
        outgrown = held[position[held] >= lane.pool.capacity]
        if not len(outgrown):
            return
        target = self._lane(bucket(lane.pool.capacity + 1, self._largest))
        sources = np.flatnonzero(np.isin(lane.slots, outgrown))
        target.pool.copy_rows(lane.pool, lane.to_device(sources), target.take_rows(lane.slots[sources]))
        lane.drop(outgrown)
