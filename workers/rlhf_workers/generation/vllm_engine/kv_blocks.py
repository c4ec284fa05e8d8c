"""Keys and values in a paged cache: where each number of a block lies, and slices of a sample out of blocks and into
them.

An attention backend packs a block as its kernels like it: on a CPU keys lie transposed, in pairs where tiles multiply
them. Rule: how is learned and never assumed. The backend's own writer puts a different number at every place of one
block, and what is read back says where each went; a backend whose places cannot all be found has no slices. Into
blocks goes everything by the backend's own writer. Must never write to a block that was not named, but for the spare
one that is learned on and is then as it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

SPARE_BLOCK: Final = 0
"""Which vLLM gives to no request: its null block."""
DIGIT: Final = 128
"""Numbers are written in digits of this base: bfloat16 holds every integer up to 256, and so does all that is wider."""
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Those whose numbers are written as they are; a cache of others is scaled."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Puts keys and values [tokens, heads, size] into slots [tokens] (block times its size, plus the place in it)."""


class UnknownLayoutError(Exception):
    """The numbers of a cache cannot be told apart; the message says of which."""


@dataclass(frozen=True)
class PagedLayer:
    """One layer's cache and its backend's writer."""

    name: str
    cache: torch.Tensor
    """[blocks, heads, tokens of a block, numbers of a token], in any order in memory."""
    key_size: int
    value_size: int
    write: Write

    @property
    def heads(self) -> int:
        """Heads of keys and values that are here."""
        return int(self.cache.shape[1])

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, as the kernels count."""
        return int(self.cache.shape[2])


@dataclass(frozen=True)
class BlockPlaces:
    """Where the numbers of a block lie."""

    keys: torch.Tensor
    """int64 [heads, tokens, size]: places in the block, flattened as its view is."""
    values: torch.Tensor


@torch.inference_mode()
def learn_places(layer: PagedLayer) -> BlockPlaces:
    """Return where the layer's writer puts things; UnknownLayoutError when it cannot be found out."""
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
    """Return the slots, int64 [stop - start], of positions of a sample that holds these blocks of so many tokens."""
    positions = torch.arange(start, stop)
    return torch.tensor(blocks, dtype=torch.int64)[positions // block_tokens] * block_tokens + positions % block_tokens


@torch.inference_mode()
def read_slice(
    layer: PagedLayer, places: BlockPlaces, blocks: Sequence[int], block_tokens: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of keys and values [heads, stop - start, size] of these positions, on the cache's device.

    `blocks` of `block_tokens` tokens are all those of the sample, as the scheduler counts them.
    """
    tokens = layer.block_tokens
    first = start - start % tokens
    rows = slots_of(blocks, block_tokens, first, stop)[::tokens] // tokens
    held = layer.cache.index_select(0, rows.to(layer.cache.device)).flatten(1)
    keys, values = (_in_order(held, at)[:, start - first : stop - first] for at in (places.keys, places.values))
    return keys, values


@torch.inference_mode()
def write_slice(layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values [heads, tokens, size] of one dtype with the cache, on any device, into slots [tokens]."""
    device = layer.cache.device
    layer.write(_heads_first(keys.to(device)), _heads_first(values.to(device)), slots.to(device))


def _in_order(held: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[heads, rows of tokens, size] of blocks [rows, numbers]."""
    heads, tokens, size = places.shape
    picked = held[:, places.reshape(-1)].view(-1, heads, tokens, size)
    return picked.transpose(0, 1).reshape(heads, -1, size)


def _heads_first(numbers: torch.Tensor) -> torch.Tensor:
    """The first two axes exchanged, in memory too."""
    return numbers.transpose(0, 1).contiguous()
