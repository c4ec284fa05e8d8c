"""The shape of a transformer as its config.json tells it: widths, layers, experts, and the parameters of a layer.

Rule: arithmetic over what the file says; what it does not say is an error, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_common.model_files.model_folder_check import ties_embeddings


@dataclass(frozen=True)
class Experts:
    """Of the layers that route tokens to experts."""

    count: int
    """Of a layer."""
    chosen: int
    """By each token."""
    width: int
    """Inner width of one."""
    dense: frozenset[int] = frozenset()
    """Layers, from 0, that have a feed-forward map in their place."""

    def parameters(self, hidden: int) -> int:
        """Return the parameters of the experts of one layer and of its router."""
        return self.count * hidden * (3 * self.width + 1)


@dataclass(frozen=True)
class TransformerShape:
    """Of a model like Llama."""

    family: str
    """`model_type` of its config."""
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    window: int | None = None
    """Tokens that a sliding layer sees; None: there is none."""
    experts: Experts | None = None
    """None: every layer has one feed-forward map."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_value_heads * self.head_width

    def layer_parameters(self, routed: bool) -> int:
        """Return the parameters of the matrices of a layer, whose tokens are `routed` to experts or are not; norms and
        biases are left out, less than a thousandth."""
        inner = 3 * self.hidden * self.intermediate
        if routed and self.experts is not None:
            inner = self.experts.parameters(self.hidden)
        return self.hidden * (2 * self.queries + 2 * self.keys) + inner


def shape_of(config: Mapping[str, Any]) -> TransformerShape:
    """Return the shape that a config.json tells. KeyError, TypeError or ValueError when it tells none."""
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    return TransformerShape(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=ties_embeddings(config),
        window=int(window) if window is not None else None,
        experts=_experts_of(config),
    )


def _experts_of(config: Mapping[str, Any]) -> Experts | None:
    count = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    if count < 2:
        return None
    layers, every = range(int(config["num_hidden_layers"])), int(config.get("decoder_sparse_step") or 1)
    alone = config.get("mlp_only_layers") or ()
    return Experts(
        count=count,
        chosen=int(config["num_experts_per_tok"]),
        width=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        dense=frozenset(layer for layer in layers if layer in alone or (layer + 1) % every),
    )
