"""A cache arrives as it was sent, for any type and chunks; a chunk that does not continue it is rejected."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_common import control_pb2 as pb
from rlhf_workers.generation.migration import kv_chunks
from rlhf_workers.generation.migration.kv_chunks import GROWTH_TOKENS, IncomingCache, KvRefusedError, chunks
from rlhf_workers.models.kv_slices import KvShape, KvSlice

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Memory:
    """A budget that records the allocated bytes."""

    def __init__(self, most: int = 2**30) -> None:
        self.most, self.held, self.peak = most, 0, 0

    def __call__(self, more: int) -> bool:
        if self.held + more > self.most:
            return False
        self.held += more
        self.peak = max(self.peak, self.held)
        return True


def cache(dtype: torch.dtype, tokens: int, seed: int = 0) -> KvSlice:
    """Return three layers of different sizes, with NaNs among the numbers."""
    random = torch.Generator().manual_seed(seed)
    layers = tuple(
        (
            torch.randn(heads, tokens, 4, generator=random).to(dtype),
            torch.randn(heads, tokens, 6, generator=random).to(dtype),
        )
        for heads in (1, 2, 2)
    )
    layers[0][0][0, 0, 0] = torch.nan
    return KvSlice(0, tokens, layers)


def shapes(whole: KvSlice) -> tuple[KvShape, ...]:
    return tuple(KvShape.from_tensors(*states) for states in whole.layers)


def part(whole: KvSlice, start: int, stop: int) -> KvSlice:
    return KvSlice(start, stop, tuple((k[:, start:stop], v[:, start:stop]) for k, v in whole.layers))


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 200),
    known_tokens=st.integers(0, 200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    chunk_bytes=st.sampled_from([1, 64, 1000, 2**22]),
)
def test_any_cut_of_any_type_arrives_to_the_bit(
    dtype: torch.dtype, tokens: int, known_tokens: int, cuts: list[int], chunk_bytes: int
) -> None:
    whole, memory = cache(dtype, tokens), Memory()
    arrival = IncomingCache(shapes(whole), known_tokens, 250, memory)
    edges = sorted({0, tokens, *[cut for cut in cuts if cut < tokens]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_chunks, "CHUNK_BYTES", chunk_bytes)
        for start, stop in itertools.pairwise(edges):
            for message in chunks(part(whole, start, stop)):
                arrival.take(pb.KvPart.FromString(message.SerializeToString()).chunk)
    result = arrival.whole(tokens)
    assert result is not None
    for layer, arrived in zip(whole.layers, result.layers, strict=True):
        for wanted, got in zip(layer, arrived, strict=True):
            assert wanted.contiguous().view(torch.uint8).equal(got.contiguous().view(torch.uint8))
    per_token = sum(shape.bytes for shape in shapes(whole))
    assert arrival.received == tokens * per_token
    assert tokens * per_token <= memory.held <= 250 * per_token
    arrival.close()
    assert memory.held == 0


def damaged(message: pb.KvChunk, damage: str) -> pb.KvChunk:
    """Return the chunk with one error; its checksum is right where the data changed."""
    other = pb.KvChunk()
    other.CopyFrom(message)
    match damage:
        case "bit":
            data = np.frombuffer(other.data.data, np.uint8).copy()
            data[0] ^= 1
            other.data.data = data.tobytes()
        case "short":
            other.data.data = other.data.data[:-4]
        case "dtype":
            other.data.dtype = "float64"
        case "heads":
            other.data.shape[0] += 1
        case "flat":
            del other.data.shape[1:]
        case "layer":
            other.layer = 3
        case "gap":
            other.position = 2
        case "kind":
            other.values = not other.values
    return other


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("bit", "checksum is"),
        ("short", "bytes are not"),
        ("dtype", "is not float32"),
        ("heads", "is not float32"),
        ("flat", "came where"),
        ("layer", "the model has 3 layers"),
        ("gap", "came where position 0 was due"),
        ("kind", r"is not float32 \[1, tokens, 6\]"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_by_name(damage: str, words: str) -> None:
    whole = cache(torch.float32, 9)
    arrival = IncomingCache(shapes(whole), 9, 20, Memory())
    first = next(chunks(whole)).chunk
    with pytest.raises(KvRefusedError, match=words):
        arrival.take(damaged(first, damage))
    arrival.take(first)


def test_a_cache_is_given_out_whole_only() -> None:
    whole = cache(torch.float32, 9)
    arrival = IncomingCache(shapes(whole), 9, 20, Memory())
    assert arrival.whole(0) is None
    messages = [message.chunk for message in chunks(whole)]
    for message in messages[:-1]:
        arrival.take(message)
    with pytest.raises(KvRefusedError, match="9 positions were handed over, layer 2 has 0"):
        arrival.whole(9)
    with pytest.raises(KvRefusedError, match="came where position 9 was due"):
        arrival.take(messages[0])


@pytest.mark.parametrize("fails", [False, True])
def test_growth_counts_both_buffers_while_both_exist(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    whole, memory = cache(torch.float32, 200), Memory()
    per_token = sum(shape.bytes for shape in shapes(whole))
    arrival = IncomingCache(shapes(whole), 36, 200, memory)
    assert memory.held == 100 * per_token
    if fails:
        monkeypatch.setattr(kv_chunks, "host_memory", lambda size, *, pinned: torch.empty(-1))
        with pytest.raises(RuntimeError):
            arrival.take(next(chunks(whole)).chunk)
        assert memory.held == 100 * per_token
    else:
        arrival.take(next(chunks(whole)).chunk)
        assert (memory.peak, memory.held) == (300 * per_token, 200 * per_token)
    arrival.close()
    assert memory.held == 0


def test_memory_is_bounded_and_so_is_a_sample() -> None:
    whole = cache(torch.float32, 200)
    per_token = sum(shape.bytes for shape in shapes(whole))
    memory = Memory((10 + GROWTH_TOKENS) * per_token)
    arrival = IncomingCache(shapes(whole), 10, 250, memory)
    with pytest.raises(KvRefusedError, match="no memory for 200 positions"):
        IncomingCache(shapes(whole), 200, 200, memory)
    with pytest.raises(KvRefusedError, match="no memory for"):
        arrival.take(next(chunks(whole)).chunk)
    arrival.close()
    arrival = IncomingCache(shapes(whole), 10, 50, memory)
    with pytest.raises(KvRefusedError, match="position 200 is beyond the sample's 50"):
        arrival.take(next(chunks(whole)).chunk)
