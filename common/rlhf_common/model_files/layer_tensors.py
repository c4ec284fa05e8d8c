"""The tensors of a model's layers according to config.json, for the families that this project trains. No torch is
needed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_CONSTANTS: Final = re.compile(r".*(inv_freq|masked_bias|attn\.bias)")
"""Tensors that models compute themselves and some files contain."""
_EVERY: Final = (
    r"(input|post_attention)_layernorm\.weight|self_attn\.[qkvo]_proj\.weight|mlp\.(gate|up|down)_proj\.weight|"
    r"(mlp|block_sparse_moe)\.(gate\.weight|experts\..+)"
)
_OWN: Final[Mapping[str, str]] = {
    "gemma2": r"(pre|post)_feedforward_layernorm\.weight",
    "qwen2": r"self_attn\.[qkv]_proj\.bias",
    "qwen3": r"self_attn\.[qk]_norm\.weight",
    "qwen3_moe": r"self_attn\.[qk]_norm\.weight",
}
"""Layer tensors of a family in addition to `_EVERY`."""
_BIASES: Final[Mapping[str, str]] = {
    "attention_bias": r"self_attn\.[qkvo]_proj\.bias",
    "mlp_bias": r"mlp\.(gate|up|down)_proj\.bias",
}
"""Key of config.json -> biases that the layers have if it is true."""
_WITH_BIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "gemma2": ("attention_bias",),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias",),
}
"""Family -> keys that it reads."""


def layer_problem(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first layer tensor that does not fit config.json, and why; empty if there is none."""
    family, layers = str(config["model_type"]), config.get("num_hidden_layers")
    keys = [key for key in _WITH_BIASES.get(family, ()) if config.get(key)]
    parts = [_EVERY, *([_OWN[family]] if family in _OWN else []), *(_BIASES[key] for key in keys)]
    pattern = re.compile("|".join(parts))
    for name in sorted(names):
        layer = _LAYER.fullmatch(name)
        if layer is None or _CONSTANTS.fullmatch(name):
            continue
        if isinstance(layers, int) and int(layer[1]) >= layers:
            return f"{name}, and config.json has num_hidden_layers {layers}"
        if not pattern.fullmatch(layer[2]):
            off = next((key for key in _WITH_BIASES.get(family, ()) if re.fullmatch(_BIASES[key], layer[2])), "")
            why = f"config.json has {off} false" if off else f"a layer of {family} has no {layer[2]}"
            return f"{name}, and {why}"
    return ""
