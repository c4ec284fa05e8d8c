"""The part of a sample's KV cache that moves between two workers: its shapes, a slice of it, and the reserved slot.

Rule: positions count from the prompt's first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlhf_common.samples import SampleKey


def _at_once() -> None:
    """Do nothing: all copies are complete."""


class KvShape(NamedTuple):
    """Shape of one token's entry in one layer's cache."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @classmethod
    def from_tensors(cls, keys: torch.Tensor, values: torch.Tensor) -> "KvShape":
        """Return the shape of keys and values [.., heads, tokens, size]."""
        return cls(keys.shape[-3], keys.shape[-1], values.shape[-1], keys.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values together."""
        return int(self.heads * (self.key_size + self.value_size) * self.dtype.itemsize)


@dataclass(frozen=True)
class KvSlice:
    """Keys and values of positions start .. stop-1 of one sample, counted from the prompt's first token."""

    start: int
    stop: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values of each layer, float [heads, stop - start, size], in host memory."""
    ready: Callable[[], None] = _at_once
    """Waits until `layers` are complete, since a device may still copy; for the thread that reads them."""
    memory: torch.Tensor | None = None
    """Host memory, uint8 [bytes], of which all `layers` are views; None: they are copied one by one."""

    def fits(self, shapes: Sequence[KvShape]) -> bool:
        """Return whether it has every layer of a model with these shapes, each at all of its positions."""
        length = self.stop - self.start
        return len(self.layers) == len(shapes) and all(
            KvShape.from_tensors(keys, values) == shape and keys.shape[1] == values.shape[1] == length
            for (keys, values), shape in zip(self.layers, shapes, strict=True)
        )


@dataclass(frozen=True)
class KvReservation:
    """A reserved slot for an incoming sample, with the limits of its KV cache."""

    key: SampleKey
    shapes: tuple[KvShape, ...]
    expected: int
    """Approximate number of positions at the offer."""
    longest: int
    """Maximum number of positions."""
