"""The shape of a transformer from its config.json.

Rule: arithmetic on values of the file. A missing required value is an error; optional ones have defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_common.model_files.config_counts import count_in, experts_in, window_in
from rlhf_common.model_files.model_folder_check import ties_embeddings


@dataclass(frozen=True)
class Experts:
    """Experts of the layers that route tokens."""

    count: int
    """Number of experts per layer."""
    chosen: int
    """Number of experts chosen by each token."""
    width: int
    """Inner width of one expert."""
    dense: frozenset[int] = frozenset()
    """Layers, from 0, that have a feed-forward map instead of experts."""

    def parameters(self, hidden: int) -> int:
        """Return the parameters of the experts of one layer and of its router."""
        return self.count * hidden * (3 * self.width + 1)


@dataclass(frozen=True)
class TransformerShape:
    """Shape of a model like Llama."""

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
    """Tokens in the window of a sliding layer; None without one."""
    experts: Experts | None = None
    """Experts; None if every layer has one feed-forward map."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_value_heads * self.head_width

    def layer_parameters(self, routed: bool) -> int:
        """Return the parameters of the matrices of a layer.

        `routed` is whether its tokens are routed to experts. Norms and biases are left out.
        """
        inner = 3 * self.hidden * self.intermediate
        if routed and self.experts is not None:
            inner = self.experts.parameters(self.hidden)
        return self.hidden * (2 * self.queries + 2 * self.keys) + inner


def shape_of(config: Mapping[str, Any]) -> TransformerShape:
    """Return the shape from a config.json.

    Raises KeyError, TypeError, ValueError or ArithmeticError (such as for Infinity) for a missing or wrong value.
    """
    heads, hidden = count_in(config, "num_attention_heads"), count_in(config, "hidden_size")
    return TransformerShape(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=count_in(config, "num_hidden_layers"),
        heads=heads,
        key_value_heads=count_in(config, "num_key_value_heads", heads),
        head_width=count_in(config, "head_dim", hidden // heads),
        intermediate=count_in(config, "intermediate_size"),
        vocabulary=count_in(config, "vocab_size"),
        tied=ties_embeddings(config),
        window=window_in(config) or None,
        experts=_experts_of(config),
    )


def _experts_of(config: Mapping[str, Any]) -> Experts | None:
    count = experts_in(config)
    if count < 2:
        return None
    layers, every = range(count_in(config, "num_hidden_layers")), count_in(config, "decoder_sparse_step", 1)
    alone = config.get("mlp_only_layers") or ()
    return Experts(
        count=count,
        chosen=count_in(config, "num_experts_per_tok"),
        width=count_in(config, "moe_intermediate_size", count_in(config, "intermediate_size")),
        dense=frozenset(layer for layer in layers if layer in alone or (layer + 1) % every),
    )


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage: consecutive, near-equal; the first stages take the remainder, the last has the
    head."""
    base, more = divmod(layers, stages)
    start = stage * base + min(stage, more)
    return range(start, start + base + (stage < more))
