"""Operations of a fused decode pass on a CPU, beside matrix products: few calls, and few unneeded keys are read.

Rule: results equal those of `TorchOps` up to rounding. Must never change an argument but `residual` and the pool.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from rlhf_workers.generation.torch_engine.decode_ops import CachePlace, Rotation

CALL_BYTES: Final = 128 * 1024
"""Estimated bytes of keys and values that a core reads in the time of one more attention call."""


class CachedRow(NamedTuple):
    """A pool row, with the neighbouring rows of a pass that read it."""

    pool: int
    readers: int
    """Number of these rows."""
    length: int
    """Keys that the reader with most keys sees."""


class RowRun(NamedTuple):
    """Neighbouring pool rows that share one attention call; the same number of pass rows reads each."""

    start: int
    """First row of the run in the pass."""
    pool: int
    """First row of the run in the pool."""
    rows: int
    """Number of pool rows."""
    readers: int
    """Rows of the pass per pool row."""
    longest: int
    """Keys read of each pool row."""


def cached_rows(pool: Sequence[int], lengths: Sequence[int]) -> list[CachedRow]:
    """Join neighbouring rows of a pass that read the same pool row, with up to `lengths` keys each."""
    cached: list[CachedRow] = []
    for row, length in zip(pool, lengths, strict=True):
        if cached and cached[-1].pool == row:
            cached[-1] = CachedRow(row, cached[-1].readers + 1, max(cached[-1].length, length))
        else:
            cached.append(CachedRow(row, 1, length))
    return cached


def runs_of(cached: Sequence[CachedRow], spare: int) -> list[RowRun]:
    """Divide rows into runs; joining a row may cost up to `spare` surplus keys."""
    runs: list[RowRun] = []
    start = 0
    for pool, readers, length in cached:
        if runs and runs[-1].readers == readers and runs[-1].pool + runs[-1].rows == pool:
            last = runs[-1]
            wasted = last.longest - length if length <= last.longest else (length - last.longest) * last.rows
            if wasted <= spare:
                runs[-1] = last._replace(rows=last.rows + 1, longest=max(last.longest, length))
                start += readers
                continue
        runs.append(RowRun(start, pool, 1, readers, length))
        start += readers
    return runs


class CpuOps:
    """Implements `DecodeOps` on a CPU."""

    def __init__(self) -> None:
        self._cached: list[CachedRow] = []
        self._positions = self._rows = torch.empty(0, dtype=torch.int64)
        self._signed_sin = torch.empty(0)
        self._runs: list[RowRun] = []
        self._masks: dict[int, list[torch.Tensor | None]] = {}

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """See DecodeOps."""
        low, high = sin.chunk(2, dim=-1)
        self._signed_sin = torch.cat([-low, high], dim=-1)[:, None]
        self._positions, self._rows = positions, rows
        self._cached = cached_rows(rows.tolist(), (positions + 1).tolist())
        self._runs = []
        self._masks = {}

    def add_norm(self, x: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See DecodeOps."""
        if x is not None:
            residual += x
        return rms_norm(residual, gain.shape, gain, eps)

    def rotate_and_store(self, qkv: torch.Tensor, turn: Rotation, place: CachePlace, heads: int) -> torch.Tensor:
        """See DecodeOps."""
        kv_heads, _, size = place.keys.shape[1:]
        split = qkv.view(len(qkv), heads + 2 * kv_heads, size)
        turned = split[:, : heads + kv_heads]
        if turn.gains is not None:
            parts = turned.split([heads, kv_heads], dim=1)
            turned = torch.cat(
                [rms_norm(part, gain.shape, gain, turn.eps) for part, gain in zip(parts, turn.gains, strict=True)], 1
            )
        rolled = turned.roll(size // 2, -1)
        turned = torch.addcmul(turned * turn.cos[:, None], rolled, self._signed_sin)
        place.keys[self._rows, :, place.positions] = turned[:, heads:]
        place.values[self._rows, :, place.positions] = split[:, heads + kv_heads :]
        return turned[:, :heads]

    def attend(self, queries: torch.Tensor, place: CachePlace, scaling: float, window: int) -> torch.Tensor:
        """See DecodeOps."""
        kv_heads, _, size = place.keys.shape[1:]
        if not self._runs:
            bytes_per_key = 2 * kv_heads * size * place.keys.element_size()
            self._runs = runs_of(self._cached, CALL_BYTES // bytes_per_key)
        if window not in self._masks:
            group = queries.shape[1] // kv_heads
            self._masks[window] = [self._mask(run, window, group, queries.dtype) for run in self._runs]
        parts = []
        for run, mask in zip(self._runs, self._masks[window], strict=True):
            rows = slice(run.pool, run.pool + run.rows)
            keys, values = place.keys[rows, :, : run.longest], place.values[rows, :, : run.longest]
            own = queries[run.start : run.start + run.rows * run.readers].reshape(
                run.rows, run.readers, kv_heads, -1, size
            )
            grouped = own.transpose(1, 2).reshape(run.rows, kv_heads, -1, size)
            attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
            parts.append(attended.view(own.transpose(1, 2).shape).transpose(1, 2).reshape(run.rows * run.readers, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecodeOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def _mask(self, run: RowRun, window: int, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask added to the scores [rows, 1, queries, longest] of a run; None if every row sees all keys."""
        positions = self._positions[run.start : run.start + run.rows * run.readers]
        if int(positions.min()) + 1 == run.longest and (not window or window >= run.longest):
            return None
        behind = positions[:, None] - torch.arange(run.longest)
        hidden = behind < 0 if not window else (behind < 0) | (behind >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if run.readers == 1:
            return mask[:, None, None]
        return mask.view(run.rows, 1, run.readers, -1).repeat_interleave(group, dim=2)
