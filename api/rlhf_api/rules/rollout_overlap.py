"""Rules of `spec.rollout.overlapTraining`: an iteration decodes during training on the previous one.

`absent_groups` has the rule that the algorithm generates.
"""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_api.rules.rule import Rule, Values

_FIELD: Final = "spec.rollout.overlapTraining"
_NEEDED: Final[tuple[tuple[str, Any], ...]] = (
    ("spec.placement", "Dedicated"),
    ("spec.training.criticOverlap", "Disabled"),
    ("spec.rollout.maxStaleness", 0),
)
"""(field, required value)."""
_EVERY: Final = "spec.checkpoints.every"
"""Field that must be above 1 if checkpoints are set."""


def of_rollout_overlap() -> Iterator[Rule]:
    """Yield the rule of decoding during training."""
    needed = " && ".join(f"{_cel(field)} == {_literal(value)}" for field, value in _NEEDED)
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=f"{_cel(_FIELD)} == 'Disabled' || {needed} && (!has(self.checkpoints) || {_cel(_EVERY)} > 1)",
        holds=_holds,
        message=f"needs {', '.join(f'{field} {value}' for field, value in _NEEDED)}, and {_EVERY} above 1",
    )


def _holds(values: Values) -> bool:
    if values[_FIELD] == "Disabled":
        return True
    fits = all(values[field] == value for field, value in _NEEDED)
    return fits and (not values.has("spec.checkpoints") or values[_EVERY] > 1)


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _cel(path: str) -> str:
    return path.replace("spec.", "self.", 1)
