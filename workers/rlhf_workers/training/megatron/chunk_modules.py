"""A chunk of Megatron's GPTModel, built without memory, and the modules that replace Megatron's in it.

Owns the choices about Megatron: its configuration, layer specification and process groups.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.nn import functional

# Megatron may warn at import, for example about missing GPU libraries.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_planner.tensor_split import expert_count
from rlhf_workers.training.megatron.chunk_experts import (
    expert_settings,
    is_normalised,
    put_in_experts,
)
from rlhf_workers.training.megatron.folder_format import vocabulary_rows
from rlhf_workers.training.parallel.context_attention import ChunkMasks
from rlhf_workers.training.parallel.sequence_parallel import divided_sum, linear_of_rows
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.stages.pipeline_stage import Attention

log = logging.getLogger(__name__)

HEADS_NORMED: Final = ("qwen3", "qwen3_moe")
"""`model_type`s that norm queries and keys per head."""


class PlainColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's column-parallel layer: every rank computes some of the outputs."""

    tensor: TensorGroup
    widens = False

    def forward(self, input_: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Return [s, b, out / ranks] for [s, b, in], of which a rank may have only its positions, and None as the bias
        to add."""
        if self.tensor.by_position:
            return linear_of_rows(input_, self.weight, self.bias, self.tensor), None
        output = functional.linear(self.tensor.shared(input_), self.weight, self.bias)
        return output.float() if self.widens else output, None


class PlainRowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel layer: every rank takes some of the inputs. No family here has a bias in one."""

    tensor: TensorGroup
    widens: bool
    """Whether outputs are float32 for any type of product."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return [s, b, out] for [s, b, in / ranks], of which a rank may get only its positions, and None as the bias
        to add."""
        partial = functional.linear(input_, self.weight)
        total = divided_sum(partial, self.tensor) if self.tensor.by_position else self.tensor.summed(partial)
        return total.float() if self.widens else total, None


class CausalAttention(nn.Module):
    """Attention of right-padded sequences, explicit or with PyTorch's fused kernels."""

    def __init__(self, config: Any, kernel: Attention, **_: Any) -> None:
        """`kernel`: names that end in eager mean explicit attention. Megatron passes more arguments, without effect
        here."""
        super().__init__()
        self._eager = kernel.endswith("eager")
        self._scale = config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | ChunkMasks | None,
        **_: Any,
    ) -> torch.Tensor:
        """Return [s, b, heads x width] for query [s, b, heads, width], key and value [s, b, groups, width].

        `mask` is added to the scores in explicit attention. Fused kernels take it as their mask; None: causal. A rank
        with some positions gets the masks of its chunks.
        """
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if isinstance(mask, ChunkMasks):
            seen = torch.cat([self._seen(*part) for part in mask.parts(query, key, value)], dim=2)
        else:
            seen = self._seen(query, key, value, mask)
        return seen.permute(2, 0, 1, 3).flatten(2)

    def _seen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) if repeats > 1 else part for part in (key, value))
        if not self._eager:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale
            )
        scores = torch.matmul(query, key.transpose(2, 3)) * self._scale
        if mask is not None:
            scores = scores + mask
        shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(shares, value)


def build_chunk(
    config: Any,
    routed: Sequence[bool],
    first: bool,
    last: bool,
    shared: bool,
    attention: Attention,
    tensor: TensorGroup,
) -> Any:
    """Return a GPTModel on the meta device for a Hugging Face configuration.

    `routed`: whether each layer has experts. `first` adds the embedding, `last` norm and output layer; `shared`: the
    output layer uses the embedding's weight.
    """
    alone = ProcessGroup(HashStore(), 0, 1)  # a group of one rank, which never communicates
    names = ("cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_dp_cp")
    groups = dict.fromkeys(names, alone)
    groups |= dict.fromkeys(("tp", "tp_cp"), ProcessGroup(HashStore(), tensor.rank, tensor.size))
    specs = {experts: _layer_spec(config, experts, attention) for experts in set(routed)}
    with torch.device("meta"):
        chunk = GPTModel(
            _configuration(config, len(routed), any(routed), tensor.size),
            TransformerBlockSubmodules([specs[experts] for experts in routed], LayerNormImpl),
            vocab_size=vocabulary_rows(config.vocab_size, tensor.size) * tensor.size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shared,
            position_embedding_type="none",  # rotations come from the model's own configuration
            pg_collection=ProcessGroupCollection(**groups),
        )
    for module in chunk.modules():
        if isinstance(module, PlainColumnLinear | PlainRowLinear):
            module.tensor = tensor
        if isinstance(module, PlainRowLinear):
            module.widens = any(routed)
    for layer in chunk.decoder.layers:
        layer.self_attention.linear_qkv.widens = any(routed)
    return chunk


def _layer_spec(config: Any, experts: bool, attention: Attention) -> Any:
    """Return the specification of a layer: Megatron's local one, with some of its modules replaced."""
    norms = hasattr(config, "use_qk_norm") or config.model_type in HEADS_NORMED
    number = expert_count(config.to_dict()) if experts else None
    spec = get_gpt_layer_local_spec(number, qk_layernorm=norms, normalization="RMSNorm")
    attending = spec.submodules.self_attention.submodules
    attending.linear_qkv, attending.linear_proj = PlainColumnLinear, PlainRowLinear

    def core_attention(**options: Any) -> CausalAttention:
        return CausalAttention(kernel=attention, **options)

    attending.core_attention = core_attention
    if experts:
        put_in_experts(spec, is_normalised(config), PlainColumnLinear, PlainRowLinear)
    else:
        feeding = spec.submodules.mlp.submodules
        feeding.linear_fc1, feeding.linear_fc2 = PlainColumnLinear, PlainRowLinear
    return spec


def _configuration(config: Any, layers: int, experts: bool, tensor: int) -> Any:
    heads = config.num_attention_heads
    return TransformerConfig(
        num_layers=layers,
        tensor_model_parallel_size=tensor,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **(expert_settings(config) if experts else {}),
    )
