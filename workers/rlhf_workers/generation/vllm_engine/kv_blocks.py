"""Copies a sample's keys and values out of the blocks of a paged cache, and into them.

Rule: the layout of a block is learned, never assumed. Must never write to a block that was not named, except the spare
block used for learning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

SPARE_BLOCK: Final = 0
"""vLLM's null block, which no request gets."""
DIGIT: Final = 128
"""Base of the digits in which numbers are written; bfloat16 represents every integer up to 256."""
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Cache types that store numbers unchanged; others are scaled."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values [tokens, heads, size] into slots [tokens] (block times its size, plus the position in it)."""


class UnknownLayoutError(Exception):
    """The layout of a cache cannot be learned; the message names the layer."""


@dataclass(frozen=True)
class PagedLayer:
    """One layer's cache and its backend's writer."""

    name: str
    cache: torch.Tensor
    """View [blocks, heads, tokens of a block, numbers of a token], in any memory order."""
    key_size: int
    value_size: int
    write: Write

    @property
    def heads(self) -> int:
        """Return the number of key heads in this process; there are as many value heads."""
        return int(self.cache.shape[1])

    @property
    def block_tokens(self) -> int:
        """Return the tokens per block of the kernels."""
        return int(self.cache.shape[2])


@dataclass(frozen=True)
class BlockPlaces:
    """Element positions of keys and values in a block."""

    keys: torch.Tensor
    """Positions int64 [heads, tokens, size] in the flattened view of a block."""
    values: torch.Tensor


@torch.inference_mode()
def learn_places(layer: PagedLayer) -> BlockPlaces:
    """Return where the layer's writer stores elements; UnknownLayoutError if that cannot be learned."""
    cache, tokens = layer.cache, layer.block_tokens
    if cache.dim() != 4 or cache.dtype not in DTYPES:
        raise UnknownLayoutError(f"{layer.name}: a cache of {list(cache.shape)} in {cache.dtype} has no plain numbers")
    shapes = [(tokens, layer.heads, size) for size in (layer.key_size, layer.value_size)]
    counts = [tokens * layer.heads * size for size in (layer.key_size, layer.value_size)]
    left = torch.arange(1, sum(counts) + 1, device=cache.device)
    found = torch.zeros(cache[SPARE_BLOCK].numel(), dtype=torch.int64, device=cache.device)
    slots = torch.arange(tokens, device=cache.device) + SPARE_BLOCK * tokens
    before, unit = cache[SPARE_BLOCK].clone(), 1
    try:
        while left.any():
            cache[SPARE_BLOCK] = 0
            keys, values = (left % DIGIT).to(cache.dtype).split(counts)
            layer.write(keys.view(shapes[0]), values.view(shapes[1]), slots)
            found += cache[SPARE_BLOCK].reshape(-1).to(torch.int64) * unit
            left, unit = left // DIGIT, unit * DIGIT
    finally:
        cache[SPARE_BLOCK] = before
    numbers, places = found.sort()
    numbers, places = numbers[-sum(counts) :], places[-sum(counts) :]
    wanted = torch.arange(1, sum(counts) + 1, device=cache.device)
    if not torch.equal(numbers, wanted) or int((found > 0).sum()) != sum(counts):
        raise UnknownLayoutError(f"{layer.name}: its writer does not put each number at a place of its own")
    keys, values = places.split(counts)
    return BlockPlaces(_heads_first(keys.view(shapes[0])), _heads_first(values.view(shapes[1])))


def slots_of(blocks: Sequence[int], block_tokens: int, start: int, stop: int) -> torch.Tensor:
    """Return the slots, int64 [stop - start], of a sample's positions in these blocks."""
    positions = torch.arange(start, stop)
    return torch.tensor(blocks, dtype=torch.int64)[positions // block_tokens] * block_tokens + positions % block_tokens


@torch.inference_mode()
def read_slice(
    layer: PagedLayer, places: BlockPlaces, blocks: Sequence[int], block_tokens: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of keys and values [heads, stop - start, size] of these positions, on the cache's device.

    `blocks` are the sample's blocks of `block_tokens` tokens, as the scheduler counts them.
    """
    tokens = layer.block_tokens
    first = start - start % tokens
    rows = slots_of(blocks, block_tokens, first, stop)[::tokens] // tokens
    cached = layer.cache.index_select(0, rows.to(layer.cache.device)).flatten(1)
    keys, values = (_in_order(cached, at)[:, start - first : stop - first] for at in (places.keys, places.values))
    return keys, values


@torch.inference_mode()
def write_slice(layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values [heads, tokens, size] of the cache's dtype, on any device, into slots [tokens]."""
    device = layer.cache.device
    layer.write(_heads_first(keys.to(device)), _heads_first(values.to(device)), slots.to(device))


def _in_order(blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return [heads, rows of tokens, size] from blocks [rows, numbers]."""
    heads, tokens, size = places.shape
    picked = blocks[:, places.reshape(-1)].view(-1, heads, tokens, size)
    return picked.transpose(0, 1).reshape(heads, -1, size)


def _heads_first(numbers: torch.Tensor) -> torch.Tensor:
    """Swap the first two axes, in memory too."""
    return numbers.transpose(0, 1).contiguous()
