"""Rules of `spec.generation.speculation`: distinct drafters, and a draft model exactly with the drafter Model."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.common_rules import each_once
from rlhf_api.rules.rule import Rule

_NODE: Final = "spec.generation.speculation"
_DRAFTERS: Final = f"{_NODE}.drafters"
_MODEL: Final = f"{_NODE}.draftModel"


def of_speculation() -> Iterator[Rule]:
    """Yield the rules of speculative decoding."""
    yield each_once(_DRAFTERS, "must name each drafter once: remove the second of a kind")
    yield Rule(
        field=_DRAFTERS,
        node=_NODE,
        cel="!('Model' in self.drafters) || has(self.draftModel)",
        holds=lambda values: "Model" not in values[_DRAFTERS] or values.has(_MODEL),
        message=f"needs {_MODEL} for the drafter Model: set its path, or remove Model",
    )
    yield Rule(
        field=_MODEL,
        node=_NODE,
        cel="!has(self.draftModel) || 'Model' in self.drafters",
        holds=lambda values: not values.has(_MODEL) or "Model" in values[_DRAFTERS],
        message=f"is read only with Model in {_DRAFTERS}: add it there, or remove this",
    )
