"""Operations of a fused decode pass beside matrix products, in torch: the definition of the kernels.

Rule: `decode_kernels` and `cpu_ops` compute the same, up to rounding.
"""

from typing import NamedTuple, Protocol

import torch


class Rotation(NamedTuple):
    """Rotary embedding of the queries and keys of a pass."""

    cos: torch.Tensor
    """Cosines [rows, size]."""
    sin: torch.Tensor
    """Sines [rows, size]."""
    gains: tuple[torch.Tensor, torch.Tensor] | None
    """Gains [size] of the per-head norms of queries and keys before the rotation; None without norms."""
    eps: float


class CachePlace(NamedTuple):
    """Position of a pass's rows in one layer's storage."""

    keys: torch.Tensor
    """Keys [pool rows, heads, capacity, size]."""
    values: torch.Tensor
    positions: torch.Tensor
    """Positions of the fed tokens, int64 [rows]."""
    rows: torch.Tensor
    """Pool row of each row, int64 [rows]; several may be equal."""


class DecodeOps(Protocol):
    """The operations between two matrix products."""

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """Prepare what the layers of a pass share: pool `rows` at `positions`, rotated with `sin`; once per pass."""

    def add_norm(self, x: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """Add x [rows, size] (None: nothing) to `residual` in place; return its root mean square norm times `gain`
        [size]."""

    def rotate_and_store(self, qkv: torch.Tensor, turn: Rotation, place: CachePlace, heads: int) -> torch.Tensor:
        """Split [rows, (heads + 2 kv heads) * size], rotate queries and keys, and store keys and values.

        Return the queries [rows, heads, size].
        """

    def attend(self, queries: torch.Tensor, place: CachePlace, scaling: float, window: int) -> torch.Tensor:
        """Return attention [rows, heads * size] of each row over its keys up to its position; `window` 0 sees all."""

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [rows, size], from [rows, 2 * size]."""


class TorchOps:
    """Implements `DecodeOps` on any device."""

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """See DecodeOps; nothing to prepare."""

    def add_norm(self, x: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See DecodeOps."""
        if x is not None:
            residual += x
        return _normed(residual, gain, eps)

    def rotate_and_store(self, qkv: torch.Tensor, turn: Rotation, place: CachePlace, heads: int) -> torch.Tensor:
        """See DecodeOps."""
        kv_heads, _, size = place.keys.shape[1:]
        queries, keys, values = qkv.view(len(qkv), -1, size).split([heads, kv_heads, kv_heads], dim=1)
        if turn.gains is not None:
            queries, keys = (
                _normed(part, gain, turn.eps) for part, gain in zip((queries, keys), turn.gains, strict=True)
            )
        place.keys[place.rows, :, place.positions] = _turned(keys, turn)
        place.values[place.rows, :, place.positions] = values
        return _turned(queries, turn)

    def attend(self, queries: torch.Tensor, place: CachePlace, scaling: float, window: int) -> torch.Tensor:
        """See DecodeOps."""
        keys, values = place.keys[place.rows], place.values[place.rows]
        grouped = queries.view(len(queries), keys.shape[1], -1, keys.shape[3])
        behind = place.positions[:, None] - torch.arange(keys.shape[2], device=queries.device)
        hidden = behind < 0 if not window else (behind < 0) | (behind >= window)
        scores = (grouped @ keys.transpose(2, 3)).float() * scaling
        weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
        return (weights.to(values.dtype) @ values).reshape(len(queries), -1)

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecodeOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    return gain * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turned(x: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Rotate [rows, heads, size] by the angles of each row."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = turn.cos.float()[:, None], turn.sin.float()[:, None]
    return (x.float() * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
