"""Triton kernels of a fused decode pass, and their launches.

Rule: sums are float32. Must never be imported without Triton.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

KEYS_AT_ONCE: Final = 64
"""Keys that a program reads at once."""
LEAST_ROWS: Final = 16
"""Minimum rows of a tensor core product; query heads of a group are padded to it."""
PROGRAMS: Final = 264
"""Programs that fill a device: two per multiprocessor of an H100."""
MOST_SPLITS: Final = 32
ACTIVATIONS_AT_ONCE: Final = 1024
NO_WINDOW: Final = 2**30
"""Window of a row without one, longer than any context."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, residual, weight, out, eps, size, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < size
    residual_sum = tl.load(residual + row * size + index, mask=inside, other=0.0)
    kind = residual_sum.dtype
    if ADD:
        added = tl.load(x + row * size + index, mask=inside, other=0.0)
        residual_sum = (residual_sum.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(residual + row * size + index, residual_sum, mask=inside)
    value = residual_sum.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    normed = (value * scale).to(kind).to(tl.float32)
    gain = tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + index, (normed * gain).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    positions,
    query_gain,
    key_gain,
    queries,
    keys,
    values,
    rows,
    eps,
    heads,
    kv_heads,
    capacity,
    half,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    inside = index < half
    size = 2 * half
    source = qkv + row * (heads + 2 * kv_heads) * size + head * size
    low = tl.load(source + index, mask=inside, other=0.0)
    high = tl.load(source + half + index, mask=inside, other=0.0)
    kind = low.dtype
    position = tl.load(positions + row)
    kv_head = tl.where(head < heads + kv_heads, head - heads, head - heads - kv_heads)
    place = ((tl.load(rows + row) * kv_heads + kv_head) * capacity + position) * size
    if head < heads + kv_heads:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / size + eps)
            gain = query_gain
            if head >= heads:
                gain = key_gain
            a = (a * scale).to(kind).to(tl.float32) * tl.load(gain + index, mask=inside, other=0.0).to(tl.float32)
            b = (b * scale).to(kind).to(tl.float32) * tl.load(gain + half + index, mask=inside, other=0.0).to(
                tl.float32
            )
            a = a.to(kind).to(tl.float32)
            b = b.to(kind).to(tl.float32)
        turn = row * size + index
        low_cos = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        low_sin = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + turn + half, mask=inside, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + turn + half, mask=inside, other=0.0).to(tl.float32)
        low = (a * low_cos - b * low_sin).to(kind)
        high = (b * high_cos + a * high_sin).to(kind)
    if head < heads:
        target = queries + (row * heads + head) * size
    elif head < heads + kv_heads:
        target = keys + place
    else:
        target = values + place
    tl.store(target + index, low, mask=inside)
    tl.store(target + half + index, high, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    positions,
    sums,
    scales,
    rows,
    scaling,
    kv_heads,
    capacity,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(positions + row).to(tl.int32) + 1
    begin = tl.maximum(end - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, end)
    member = tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    step = tl.arange(0, BLOCK)
    head = kv_head * GROUP + member
    heads = kv_heads * GROUP
    query = tl.load(
        queries + (row * heads + head[:, None]) * SIZE + column[None, :], mask=member[:, None] < GROUP, other=0.0
    )
    base = (tl.load(rows + row) * kv_heads + kv_head) * capacity * SIZE
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(low, high, BLOCK):
        place = start + step
        there = place < high
        key = tl.load(keys + base + place[:, None] * SIZE + column[None, :], mask=there[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        score = tl.where(there[None, :], score, float("-inf"))
        raised = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - raised)
        weight = tl.exp(score - raised[:, None])
        value = tl.load(values + base + place[:, None] * SIZE + column[None, :], mask=there[:, None], other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, axis=1)
        top = raised
    line = (row * heads + head) * SPLITS + split
    own = member < GROUP
    tl.store(sums + line[:, None] * SIZE + column[None, :], summed, mask=own[:, None])
    tl.store(scales + line * 2, top, mask=own)
    tl.store(scales + line * 2 + 1, total, mask=own)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(sums, scales, out, SIZE: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, SIZE)
    top = tl.load(scales + (line * SPLITS + split) * 2)
    total = tl.load(scales + (line * SPLITS + split) * 2 + 1)
    weight = tl.exp(top - tl.max(top, axis=0))
    part = tl.load(sums + (line * SPLITS + split[:, None]) * SIZE + column[None, :])
    joined = tl.sum(part * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out + line * SIZE + column, joined.to(out.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _silu_times(gate_up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gate = tl.load(gate_up + row * 2 * size + index, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + index, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    active = (value / (1.0 + tl.exp(-value))).to(gate.dtype)
    tl.store(out + row * size + index, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonOps:
    """Implements `DecodeOps` on contiguous tensors of one GPU."""

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """See DecodeOps; nothing to prepare, as kernels read rows and positions directly."""

    def add_norm(self, x: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See DecodeOps."""
        rows, size = residual.shape
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(size)
        added = residual if x is None else x
        _add_norm[(rows,)](
            added, residual, gain, out, eps, size, ADD=x is not None, BLOCK=block, num_warps=8 if block > 2048 else 4
        )
        return out

    def rotate_and_store(self, qkv: torch.Tensor, turn: Any, place: Any, heads: int) -> torch.Tensor:
        """See DecodeOps."""
        kv_heads, capacity, size = place.keys.shape[1:]
        queries = qkv.new_empty(len(qkv), heads, size)
        gains = (qkv, qkv) if turn.gains is None else turn.gains
        _rotate_and_store[(len(qkv), heads + 2 * kv_heads)](
            qkv,
            turn.cos,
            turn.sin,
            place.positions,
            *gains,
            queries,
            place.keys,
            place.values,
            place.rows,
            turn.eps,
            heads,
            kv_heads,
            capacity,
            size // 2,
            NORM=turn.gains is not None,
            BLOCK=triton.next_power_of_2(size // 2),
            num_warps=1,
        )
        return queries

    def attend(self, queries: torch.Tensor, place: Any, scaling: float, window: int) -> torch.Tensor:
        """See DecodeOps."""
        rows, heads, size = queries.shape
        kv_heads, capacity = place.keys.shape[1], place.keys.shape[2]
        splits = splits_of(rows * kv_heads)
        sums = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=queries.device)
        scales = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=queries.device)
        group = heads // kv_heads
        _attend_part[(rows, kv_heads, splits)](
            queries,
            place.keys,
            place.values,
            place.positions,
            sums,
            scales,
            place.rows,
            scaling,
            kv_heads,
            capacity,
            WINDOW=window or NO_WINDOW,
            GROUP=group,
            ROWS=max(triton.next_power_of_2(group), LEAST_ROWS),
            SIZE=size,
            SPLITS=splits,
            BLOCK=KEYS_AT_ONCE,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        out = torch.empty_like(queries)
        _join_parts[(rows * heads,)](sums, scales, out, SIZE=size, SPLITS=splits, num_warps=2)
        return out.view(rows, heads * size)

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecodeOps."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        grid = (rows, triton.cdiv(size, ACTIVATIONS_AT_ONCE))
        _silu_times[grid](gate_up, out, size, BLOCK=ACTIVATIONS_AT_ONCE, num_warps=4)
        return out


def splits_of(programs: int) -> int:
    """Return the number of parts of a row's keys, a power of two; one program handles one part of one key head of a
    row."""
    return min(max(int(triton.next_power_of_2(-(-PROGRAMS // programs))), 1), MOST_SPLITS)
