"""The whole numbers of a transformer's config.json: widths, layers, heads, experts, window.

Rule: a number that is not whole, or too small, is an error with the name and the value; it is not rounded.
"""

from collections.abc import Mapping
from typing import Any, Final

_COUNTS: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size"),
)
_EXPERT_COUNTS: Final = ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
"""Keys that matter where the model has experts."""


def count_in(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """Return a whole number of a configuration, or `default` for a missing or null one.

    Raises KeyError if it is missing without a default, and ValueError if it is no whole number of at least `least`.
    """
    value = config.get(name)
    if value is None:
        if default is None:
            raise KeyError(name)
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {least}")
    return value


def experts_in(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer that routes tokens; 0 if the configuration has none.

    Raises ValueError.
    """
    return count_in(config, "num_local_experts", 0, 0) or count_in(config, "num_experts", 0, 0)


def window_in(config: Mapping[str, Any]) -> int:
    """Return the tokens in the window of a sliding layer; 0 if the configuration has no window or switches it off.

    Raises ValueError.
    """
    return count_in(config, "sliding_window", 0, 0) if config.get("use_sliding_window", True) else 0


def count_problem(config: Mapping[str, Any]) -> str:
    """Return the first wrong number of a configuration; empty if there is none. Missing ones are not judged."""
    try:
        for name in (*_COUNTS, *(_EXPERT_COUNTS if experts_in(config) > 1 else ())):
            count_in(config, name, 0)
        window_in(config)
    except ValueError as error:
        return str(error)
    return ""
