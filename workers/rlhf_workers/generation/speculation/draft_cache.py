"""KV cache of a draft model: rows of samples whose tokens arrive in small numbers and are rolled back.

Rule: a transformers `Cache` whose `update` writes and reads where `point` says. Entries beyond a row's tokens are
stale: masks must hide them until their position is fed.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache


class DraftCache(Cache):  # type: ignore[misc]
    """Stores [rows, heads, capacity, size] per layer."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self._storage: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._length = 0
        self._view: slice | None = None

    def point(self, rows: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        """Set up a pass: `rows` [n], ascending, write at `positions` [n, q] and read keys 0 .. length-1."""
        self._rows, self._positions, self._length = rows, positions, length
        first, last = int(rows[0]), int(rows[-1])
        self._view = slice(first, last + 1) if last - first == len(rows) - 1 else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [n, heads, q, size] states; return [n, heads, length, size], a view if the rows are adjacent."""
        keys, values = self._layer(layer_idx, key_states, value_states)
        for target, states in ((keys, key_states), (values, value_states)):
            target[self._rows[:, None], :, self._positions] = states.transpose(1, 2)
        read = self._rows if self._view is None else self._view
        return keys[read, :, : self._length], values[read, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are explicit."""
        return 0

    def grow(self, rows: int, capacity: int) -> None:
        """Grow to at least this size; stored states stay in place."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        old_storage, old_rows, old_capacity = self._storage, self.rows, self.capacity
        self.rows, self.capacity, self._storage = max(rows, old_rows), max(capacity, old_capacity), {}
        for layer, states in old_storage.items():
            for target, source in zip(self._layer(layer, *states), states, strict=True):
                target[:old_rows, :, :old_capacity] = source

    def _layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the storage of a layer, allocated for the shape of its first states."""
        if layer not in self._storage:
            self._storage[layer] = (
                keys.new_zeros(self.rows, keys.shape[1], self.capacity, keys.shape[3]),
                values.new_zeros(self.rows, values.shape[1], self.capacity, values.shape[3]),
            )
        return self._storage[layer]
