"""KV memory of the torch engine: pools of rows with one position each, and the results of prefills.

Rule: both are transformers `Cache`s whose `update` does what the engine has set up for this forward pass. A pool row
belongs to one sample; keys beyond the sample's position are stale, and attention must not read them.
"""

from itertools import count
from typing import Any

import torch
from transformers.cache_utils import Cache

from rlhf_workers.models.kv_slices import KvShape

_SERIALS = count()


class PromptCache(Cache):  # type: ignore[misc]
    """Keys and values from position 0, per layer: [prompts, heads, tokens, size]."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the states of a layer."""
        self.states[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing precedes a prefill."""
        return 0


class KvPool(Cache):  # type: ignore[misc]
    """Rows of keys and values, stored as [rows, heads, capacity, size] per layer."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.serial = next(_SERIALS)
        """Number that changes when the pool grows; owners of old addresses must drop them."""
        self.storage: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._first = 0
        self._width = 0
        self._length = 0
        self._positions = torch.empty(0, dtype=torch.int64)
        self._rows: torch.Tensor | None = None
        self._copied = False
        self._indices: dict[int, torch.Tensor] = {}

    def point(self, first: int, positions: torch.Tensor, length: int) -> None:
        """Set up a decode pass: rows first .. first+n-1 write at `positions` [n] and read keys 0 .. length-1."""
        self._first, self._width, self._length = first, positions.shape[0], length
        self._positions, self._rows = positions, None
        self._indices.clear()

    def point_rows(
        self, rows: torch.Tensor, positions: torch.Tensor, length: int, shared: tuple[int, int] | None = None
    ) -> None:
        """Set up a pass in which several rows may belong to one sample: each writes at its position to pool row `rows`
        [n] and reads a copy of that row's keys 0 .. length-1.
        """
        self.point(0, positions, length)
        self._rows, self._copied = rows, shared is None
        if shared is not None:
            self._first, self._width = shared

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [n, heads, 1, size] states; return [n, heads, length, size] views, or copies of rows.

        With shared rows, write [1, heads, n, size] states; return views of those rows.
        """
        if self._rows is not None and not self._copied:
            key_states, value_states = (states.transpose(0, 2) for states in (key_states, value_states))
        keys, values = self._layer(layer_idx, key_states, value_states)
        index = self._index(keys.shape[1], keys.device)
        for target, states in ((keys, key_states), (values, value_states)):
            target.view(-1, target.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        if self._rows is not None and self._copied:
            own, theirs = (part[:, :, : self._length].index_select(0, self._rows) for part in (keys, values))
            return own, theirs
        rows = slice(self._first, self._first + self._width)
        return keys[rows, :, : self._length], values[rows, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are explicit."""
        return 0

    def write_prompts(self, prompts: PromptCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy prefilled prompts `sources` [k] into rows `targets` [k], from position 0."""
        for layer, (keys, values) in prompts.states.items():
            own = self._layer(layer, keys, values)
            for target, states in zip(own, (keys, values), strict=True):
                length = min(states.shape[2], self.capacity)
                target[targets, :, :length] = states[sources, :, :length]

    def copy_rows(self, other: "KvPool", sources: torch.Tensor, targets: torch.Tensor, keys: int | None = None) -> None:
        """Copy the first `keys` positions (None: all) of rows `sources` [k] of `other`, which may be this pool, into
        rows `targets` [k].
        """
        for layer, states in other.storage.items():
            own = self._layer(layer, *states)
            for target, source in zip(own, states, strict=True):
                length = min(source.shape[2], self.capacity, source.shape[2] if keys is None else keys)
                target[targets, :, :length] = source[sources, :, :length]

    def resize(self, rows: int, capacity: int) -> None:
        """Grow to at least this size; rows stay in place."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        grown = KvPool(max(rows, self.rows), max(capacity, self.capacity))
        for layer, (keys, values) in self.storage.items():
            own = grown._layer(layer, keys, values)
            for target, source in zip(own, (keys, values), strict=True):
                target[: self.rows, :, : self.capacity] = source
        self.rows, self.capacity, self.storage = grown.rows, grown.capacity, grown.storage
        self.serial = grown.serial

    def layer(self, layer: int, shape: KvShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's storage [rows, heads, capacity, size], allocated at its first use."""
        if layer not in self.storage:
            sizes = shape.key_size, shape.value_size
            keys, values = (
                torch.zeros(self.rows, shape.heads, self.capacity, size, dtype=shape.dtype, device=device)
                for size in sizes
            )
            self.storage[layer] = keys, values
        return self.storage[layer]

    def bytes(self) -> int:
        """Return the bytes of the storage."""
        return sum(part.numel() * part.element_size() for layer in self.storage.values() for part in layer)

    def _layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the storage of a layer, allocated for the shape of its first states."""
        if layer not in self.storage:
            self.storage[layer] = (
                keys.new_zeros(self.rows, keys.shape[1], self.capacity, keys.shape[3]),
                values.new_zeros(self.rows, values.shape[1], self.capacity, values.shape[3]),
            )
        return self.storage[layer]

    def _index(self, heads: int, device: torch.device) -> torch.Tensor:
        """Return indices [n * heads] of this pass's positions in storage viewed as [rows * heads * capacity, size]."""
        if heads not in self._indices:
            rows = self._rows
            if rows is None:
                rows = torch.arange(self._first, self._first + self._width, device=device)
            lines = (rows[:, None] * heads + torch.arange(heads, device=device)) * self.capacity
            self._indices[heads] = (lines + self._positions[:, None]).flatten()
        return self._indices[heads]
