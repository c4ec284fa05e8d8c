"""Checks from a model's config.json whether it can be split over the devices of one worker, or over training ranks.

Rule: pure. Missing values are not judged.
"""

from collections.abc import Mapping
from typing import Any


def split_problem(config: Mapping[str, Any], degree: int, *, several: bool = True) -> str:
    """Return why a model cannot be split over `degree` devices, with a smaller valid degree; empty if no problem is
    known.

    `several` allows more devices than key-value heads, a multiple of their number.
    """
    if not several and degree > 1 and expert_count(config) > 1:
        return f"the model's experts cannot be split over {degree} ranks: use 1"
    text = config.get("text_config")
    said: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    heads = _count(said, "num_attention_heads")
    groups = _count(said, "num_key_value_heads") or heads
    wrong = []
    if heads and heads % degree:
        wrong.append(f"{heads} attention heads")
    if groups and (max(groups, degree) % min(groups, degree) if several else groups % degree):
        wrong.append(f"{groups} key-value heads")
    if (columns := _count(said, "intermediate_size")) and columns % degree:
        wrong.append(f"{columns} columns of its feed-forward layers")
    if not wrong:
        return ""
    degrees = (other for other in (1, 2, 4, 8, 16, 32, 64) if other < degree)
    choices = [other for other in degrees if not split_problem(config, other, several=several)]
    return f"the model's {' and '.join(wrong)} cannot be split over {degree} devices: use {choices[-1]}"


def experts_problem(config: Mapping[str, Any], ranks: int) -> str:
    """Return why so many ranks cannot divide the experts of a model, with valid numbers; empty if no problem is known.

    An empty configuration has no known problem.
    """
    count = expert_count(config)
    if count < 2:
        return "the model has no experts: use 1" if config and ranks > 1 else ""
    if count % ranks == 0:
        return ""
    choices = ", ".join(str(other) for other in range(1, count + 1) if count % other == 0)
    return f"the model's {count} experts cannot be shared out over {ranks} ranks: use {choices}"


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer that routes tokens; 0 if the configuration names none."""
    return max(_count(config, "num_local_experts"), _count(config, "num_experts"))


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
