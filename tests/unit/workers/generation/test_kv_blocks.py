"""Slices of samples in paged caches: reading returns the written values, for any order within a block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_workers.generation.vllm_engine.kv_blocks import (
    SPARE_BLOCK,
    PagedLayer,
    UnknownLayoutError,
    Write,
    learn_places,
    read_slice,
    slots_of,
    write_slice,
)
from rlhf_workers.generation.vllm_engine.kv_executor import heads_of


def packed_layer(
    order: torch.Tensor | None, dtype: torch.dtype, heads: int, tokens: int, sizes: tuple[int, int], blocks: int
) -> PagedLayer:
    """A layer whose writer scatters the numbers of a block in `order`; with None two of them share a position."""
    cache = torch.randn(blocks, heads, tokens, sum(sizes) + 1).to(dtype)  # a number more than a token needs
    if order is None:
        order = torch.zeros(heads * tokens * sum(sizes), dtype=torch.int64)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        flat = cache.view(blocks, -1)
        places = order[: heads * tokens * sum(sizes)].view(tokens, heads, sum(sizes))
        for row, slot in enumerate(slots.tolist()):
            flat[slot // tokens, places[slot % tokens]] = torch.cat([keys[row], values[row]], dim=-1)

    return PagedLayer("layer", cache, *sizes, write)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    heads=st.integers(1, 3),
    tokens=st.sampled_from([1, 4, 16]),
    sizes=st.sampled_from([(4, 4), (6, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    length=st.integers(1, 70),
    data=st.data(),
)
def test_what_is_written_is_read_in_any_packing_and_nothing_else_changes(
    seed: int, heads: int, tokens: int, sizes: tuple[int, int], dtype: torch.dtype, length: int, data: st.DataObject
) -> None:
    """The scheduler may count in blocks of two of the kernels'."""
    torch.manual_seed(seed)
    joint = data.draw(st.sampled_from([1, 2]))
    large = tokens * joint
    count = -(-length // large)
    order = torch.randperm(heads * tokens * (sum(sizes) + 1))
    layer = packed_layer(order, dtype, heads, tokens, sizes, blocks=(count + 3) * joint)
    before = layer.cache.clone()
    places = learn_places(layer)
    assert torch.equal(layer.cache, before)
    blocks = (torch.randperm(count + 2) + 1).tolist()[:count]
    keys, values = (torch.randn(heads, length, size).to(dtype) for size in sizes)
    first = data.draw(st.integers(0, length - 1))
    for start, stop in ((0, first), (first, length)):
        if stop > start:
            write_slice(layer, keys[:, start:stop], values[:, start:stop], slots_of(blocks, large, start, stop))
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    read = read_slice(layer, places, blocks, large, start, stop)
    assert torch.equal(read[0], keys[:, start:stop])
    assert torch.equal(read[1], values[:, start:stop])
    others = [block for block in range(count + 3) if block not in blocks]
    touched = layer.cache.view(-1, joint, *layer.cache.shape[1:])
    assert torch.equal(touched[others], before.view(touched.shape)[others])


def test_a_writer_that_loses_numbers_or_scales_them_is_not_guessed_at() -> None:
    lossy = packed_layer(None, torch.float32, 2, 4, (4, 4), 2)
    with pytest.raises(UnknownLayoutError, match="layer: its writer does not put each number at a place of its own"):
        learn_places(lossy)
    plain = packed_layer(torch.randperm(2 * 4 * 9), torch.float32, 2, 4, (4, 4), 2)

    def halved(write: Write) -> Write:
        return lambda keys, values, slots: write(keys / 2, values, slots)

    with pytest.raises(UnknownLayoutError, match="place of its own"):
        learn_places(PagedLayer("layer", plain.cache, 4, 4, halved(plain.write)))
    scaled = packed_layer(torch.randperm(2 * 4 * 9), torch.float8_e4m3fn, 2, 4, (4, 4), 2)
    with pytest.raises(UnknownLayoutError, match="float8_e4m3fn has no plain numbers"):
        learn_places(scaled)
    assert SPARE_BLOCK == 0


@pytest.mark.parametrize(
    ("ranks", "own", "heads", "firsts"),
    [(1, 8, 8, [0]), (4, 2, 8, [0, 2, 4, 6]), (4, 1, 2, [0, 0, 1, 1]), (8, 1, 1, [0] * 8)],
)
def test_each_rank_knows_its_heads(ranks: int, own: int, heads: int, firsts: list[int]) -> None:
    assert [heads_of(rank, ranks, own, heads) for rank in range(ranks)] == [slice(at, at + own) for at in firsts]
