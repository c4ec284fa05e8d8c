"""What a fused decode pass is made of beside matrix products, as torch computes it: the meaning of the kernels.

Rule: these are the definition. `decode_kernels` does the same in fewer launches on a GPU, `cpu_ops` in fewer calls on a
CPU; tests hold both to it. All change `residual` and the pool in place and nothing else.
"""

from typing import NamedTuple, Protocol

import torch


class Rotation(NamedTuple):
    """How queries and keys of a pass are turned by their positions."""

    cos: torch.Tensor
    """[rows, size]"""
    sin: torch.Tensor
    """[rows, size]"""
    gains: tuple[torch.Tensor, torch.Tensor] | None
    """[size] each: queries and keys are normalised head by head first, with these gains; None: they are not."""
    eps: float


class CachePlace(NamedTuple):
    """Where the rows of a pass are in one layer's storage."""

    keys: torch.Tensor
    """[pool rows, heads, capacity, size]"""
    values: torch.Tensor
    positions: torch.Tensor
    """int64 [rows]: of the token that is fed."""
    rows: torch.Tensor
    """int64 [rows]: of the pool; several may be the same, at other positions of it."""


class DecodeOps(Protocol):
    """Everything between two matrix products."""

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """Prepare, once a pass, what its layers have in common: `rows` of the pool at `positions`, turned by `sin`."""

    def add_norm(self, x: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """Add x [rows, size] to `residual`, in place, and return its root mean square norm times `gain` [size]."""

    def rotate_and_store(self, qkv: torch.Tensor, turn: Rotation, place: CachePlace, heads: int) -> torch.Tensor:
        """Split [rows, (heads + 2 kv heads) * size], turn queries and keys, store keys and values at their positions.

        Returns the queries [rows, heads, size].
        """

    def attend(self, queries: torch.Tensor, place: CachePlace, scaling: float, window: int) -> torch.Tensor:
        """Return [rows, heads * size]: attention of each row over its keys up to its position; `window` 0 sees all."""

    def silu_times(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [rows, size] of [rows, 2 * size]."""


class TorchOps:
    """Implements `DecodeOps` on any device."""

    def begin(self, positions: torch.Tensor, rows: torch.Tensor, sin: torch.Tensor) -> None:
        """See DecodeOps: nothing is kept between calls."""

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
    """[rows, heads, size], by the angles of each row."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = turn.cos.float()[:, None], turn.sin.float()[:, None]
    return (x.float() * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
