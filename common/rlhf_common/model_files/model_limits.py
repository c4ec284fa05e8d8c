"""Limits of a causal language model, from its configuration as transformers reads it.

Rule: pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

CONTEXT_FIELD: Final = "spec.rollout.maxResponseTokens"


def context_length(text_config: Any) -> int | None:
    """Return the longest sequence in tokens, or None for a model without a limit.

    A scaled rotary embedding may raise it to its original length times its factor.
    """
    positions = getattr(text_config, "max_position_embeddings", None)
    return max([int(positions), *_scaled_lengths(text_config)]) if positions else None


def _scaled_lengths(text_config: Any) -> Iterator[int]:
    """Yield the length of each kind of layer that a factor scales."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    for scaling in rope.values() if all(isinstance(part, Mapping) for part in rope.values()) else [rope]:
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        if original and factor:
            yield int(original * factor)


def context_problem(max_prompt_tokens: int, max_response_tokens: int, positions: int | None) -> str | None:
    """Return why the longest sequence of a job does not fit a model, or None if it does."""
    longest = max_prompt_tokens + max_response_tokens
    if positions is None or longest <= positions:
        return None
    return (
        f"{CONTEXT_FIELD}: maxPromptTokens {max_prompt_tokens} + maxResponseTokens {max_response_tokens} "
        f"= {longest} is more than the {positions} positions of the model"
    )


def end_ids(*sources: Any) -> list[int]:
    """Return the ids of tokens that end a sequence, in order. Each source is an id, a list of ids or None."""
    listed = [source if isinstance(source, list | tuple) else [source] for source in sources if source is not None]
    return list(dict.fromkeys(int(token) for tokens in listed for token in tokens))
