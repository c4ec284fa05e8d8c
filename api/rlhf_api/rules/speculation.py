"""Rules of `spec.generation.speculation`: distinct drafters, a draft model exactly with the drafter Model, and what
drafts ahead need."""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_api.rules.common_rules import each_once
from rlhf_api.rules.rule import Rule, Values

_NODE: Final = "spec.generation.speculation"
_DRAFTERS: Final = f"{_NODE}.drafters"
_MODEL: Final = f"{_NODE}.draftModel"
_AHEAD: Final = f"{_NODE}.ahead"
_NEEDED_AHEAD: Final[tuple[tuple[str, Any], ...]] = (
    ("spec.placement", "Dedicated"),
    ("spec.rollout.maxStaleness", 0),
    ("spec.rollout.longRounds", "Disabled"),
    ("spec.rollout.overlapTraining", "Disabled"),
    ("spec.prompts.lengthWindow", 0),
)
"""(field, value) that drafts ahead need, besides the engine: idle workers, and known next samples."""
_ENGINES: Final = ("torch", "Auto")


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
    yield Rule(
        field=_AHEAD,
        node=_NODE,
        cel="self.ahead == 'Disabled' || self.mode != 'Disabled' && 'Siblings' in self.drafters",
        holds=lambda values: (
            values[_AHEAD] == "Disabled" or (values[f"{_NODE}.mode"] != "Disabled" and "Siblings" in values[_DRAFTERS])
        ),
        message=f"needs {_NODE}.mode Auto or Fixed, and Siblings in {_DRAFTERS}, which get the tokens",
    )
    needed = " && ".join(f"{_cel(field)} == {_literal(value)}" for field, value in _NEEDED_AHEAD)
    yield Rule(
        field=_AHEAD,
        node="spec",
        cel=f"{_cel(_AHEAD)} == 'Disabled' || self.generation.engine in ['torch', 'Auto'] && {needed}"
        " && !has(self.rollout.environment)",
        holds=lambda values: values[_AHEAD] == "Disabled" or _knows_what_comes(values),
        message=(
            f"needs spec.generation.engine torch, {', '.join(f'{field} {value}' for field, value in _NEEDED_AHEAD)}, "
            "and no spec.rollout.environment: set these, or Disabled"
        ),
    )


def _knows_what_comes(values: Values) -> bool:
    fits = all(values[field] == value for field, value in _NEEDED_AHEAD)
    return fits and values["spec.generation.engine"] in _ENGINES and not values.has("spec.rollout.environment")


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _cel(path: str) -> str:
    return path.replace("spec.", "self.", 1)
