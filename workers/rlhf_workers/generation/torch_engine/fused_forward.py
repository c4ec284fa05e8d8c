"""Runs a decode pass of a Llama-like model in few kernels per layer, over the model's own weights.

Rule: only for families whose logits agree with the model's own in a trial (`fused_forward_for`). Must never be used in
a deterministic job.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear

from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.decode_ops import CachePlace, DecodeOps, Rotation
from rlhf_workers.generation.torch_engine.forward import CausalForward, tolerance
from rlhf_workers.generation.torch_engine.kv_cache import KvPool
from rlhf_workers.generation.torch_engine.sample_rows import SampleRows
from rlhf_workers.models.attention_masks import SLIDING
from rlhf_workers.models.kv_slices import KvShape

log = logging.getLogger(__name__)

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers the operations cover; `_require_known` checks each model further."""
FIXED_ROTATIONS: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the longest sequence of a batch."""
SIZES: Final = (16, 32, 64, 128, 256)
"""Head sizes that the GPU's kernels support."""
TRIAL_TOKENS: Final = 20
"""Tokens of each row of the trial, one per pass."""


class NotFusedError(Exception):
    """A model's passes cannot be fused; the text says why."""


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, some joined to one matrix, and its attention window."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: nn.Linear
    gate_up: torch.Tensor
    down: nn.Linear
    first_norm: Any
    second_norm: Any
    gains: tuple[torch.Tensor, torch.Tensor] | None
    gains_eps: float
    scaling: float
    window: int


class FusedForward:
    """Implements `StaticForward`."""

    def __init__(self, forward: CausalForward, ops: DecodeOps) -> None:
        """`forward` drives the same model; NotFusedError if it is not supported."""
        self.device = forward.device
        self._model = forward.model
        self._ops = ops
        self._config = forward.model.config
        self._shapes: tuple[KvShape, ...] = forward.kv_shapes
        self._window = forward.window
        _require_known(forward)
        self._layers: tuple[_Layer, ...] = ()

    def keys_read(self, length: int, capacity: int) -> int:
        """See StaticForward; kernels read up to each position, so there is one length."""
        return capacity

    @torch.inference_mode()
    def decode(
        self, pool: KvPool, first: int, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """See PassForward."""
        rows = torch.arange(first, first + len(tokens), device=self.device)
        return self.decode_rows(pool, rows, tokens, positions, length)

    @torch.inference_mode()
    def decode_rows(
        self,
        pool: KvPool,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        shape: SampleRows | None = None,
    ) -> torch.Tensor:
        """See PassForward; `shape` is not used."""
        self._layers = self._layers or tuple(self._packed(index) for index in range(len(self._model.model.layers)))
        base, ops = self._model.model, self._ops
        residual = base.embed_tokens(tokens)
        cos, sin = (part[:, 0].contiguous() for part in base.rotary_emb(residual[:, None], positions[:, None]))
        ops.begin(positions, rows, sin)
        added: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = ops.add_norm(added, residual, layer.first_norm.weight, layer.first_norm.variance_epsilon)
            place = CachePlace(*pool.layer(index, self._shapes[index], self.device), positions, rows)
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            turn = Rotation(cos, sin, layer.gains, layer.gains_eps)
            queries = ops.rotate_and_store(qkv, turn, place, self._config.num_attention_heads)
            added = layer.out(ops.attend(queries, place, layer.scaling, layer.window))
            normed = ops.add_norm(added, residual, layer.second_norm.weight, layer.second_norm.variance_epsilon)
            added = layer.down(ops.silu_times(linear(normed, layer.gate_up)))
        normed = ops.add_norm(added, residual, base.norm.weight, base.norm.variance_epsilon)
        logits: torch.Tensor = self._model.lm_head(normed)
        return logits

    def release(self) -> None:
        """Drop the references to the joined matrices; the model's parameters stay views of them."""
        self._layers = ()

    @torch.inference_mode()
    def verify(self, forward: CausalForward) -> None:
        """Raise NotFusedError unless passes give the logits of `forward` within `tolerance`, each over its own pool."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(forward.vocabulary, (2, TRIAL_TOKENS), generator=generator).to(self.device)
        mine, other = KvPool(TILE_ROWS, TRIAL_TOKENS), KvPool(TILE_ROWS, TRIAL_TOKENS)
        for position in range(TRIAL_TOKENS):
            positions = torch.full((2,), position, device=self.device)
            wanted = forward.decode(other, 0, ids[:, position], positions, TRIAL_TOKENS).float()
            off = float((self.decode(mine, 0, ids[:, position], positions, TRIAL_TOKENS).float() - wanted).abs().max())
            allowed = tolerance(self._model.dtype) * (1 + float(wanted.abs().max()))
            if not off <= allowed:
                raise NotFusedError(f"its logits differ by {off:.2g} at position {position} (allowed {allowed:.2g})")

    def _packed(self, index: int) -> _Layer:
        layer = self._model.model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        for single in (attention.o_proj, mlp.down_proj):
            self._matrix(single)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [part.bias for part in projections if part.bias is not None]
        gains = None
        if hasattr(attention, "q_norm"):
            gains = attention.q_norm.weight, attention.k_norm.weight
        kinds = getattr(self._config, "layer_types", None)
        slides = kinds is None or kinds[index] == SLIDING
        return _Layer(
            qkv=self._matrix(*projections),
            qkv_bias=_joined(biases) if biases else None,
            out=attention.o_proj,
            gate_up=self._matrix(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj,
            first_norm=layer.input_layernorm,
            second_norm=layer.post_attention_layernorm,
            gains=gains,
            gains_eps=0.0 if gains is None else attention.q_norm.variance_epsilon,
            scaling=attention.scaling,
            window=self._window if slides else 0,
        )

    def _matrix(self, *parts: nn.Linear) -> torch.Tensor:
        """Return one matrix [outputs of all, inputs]."""
        return _joined([part.weight for part in parts], by_column=self.device.type == "cpu")


def fused_forward_for(forward: CausalForward, ops: DecodeOps) -> FusedForward:
    """Return verified fused passes of a model; NotFusedError with the reason if that fails, except for a lack of
    memory."""
    fused = FusedForward(forward, ops)
    try:
        fused.verify(forward)
    except (NotFusedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotFusedError(f"{type(error).__name__}: {str(error).strip()[:200]}") from error
    return fused


def _joined(parts: Sequence[torch.Tensor], *, by_column: bool = False) -> torch.Tensor:
    """Join tensors by rows; the parts become views, so that writes to them change the joined tensor.

    `by_column`: columns are contiguous in memory.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written to later
        whole = torch.cat([part.data for part in parts])
        if by_column:
            whole = whole.t().contiguous().t()
        start = 0
        for part in parts:
            part.data = whole[start : start + len(part)]
            start += len(part)
    return whole


def _require_known(forward: CausalForward) -> None:
    """Raise NotFusedError that names the first property that these kernels do not support."""
    model, config = forward.model, forward.model.config
    if config.model_type not in FAMILIES:
        raise NotFusedError(f"{config.model_type} is not one of {', '.join(FAMILIES)}")
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    head = forward.kv_shapes[0].key_size
    heads, kv_heads = config.num_attention_heads, forward.kv_shapes[0].heads
    wrong = {
        f"its rotary embedding is {rotation}": rotation not in FIXED_ROTATIONS,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        f"its heads have {head} numbers": forward.device.type == "cuda" and head not in SIZES,
        "keys and values differ in size": any(
            shape != KvShape(kv_heads, head, head, model.dtype) for shape in forward.kv_shapes
        ),
        f"{heads} query heads are shared by {kv_heads} others": heads % kv_heads != 0,
        "its projections are no plain matrices": not all(_is_plain(layer) for layer in model.model.layers),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise NotFusedError(why)


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    matrices = (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(type(part) is nn.Linear for part in matrices)
        and len({part.bias is None for part in projections}) == 1
        and mlp.gate_proj.bias is None
        and mlp.up_proj.bias is None
    )
