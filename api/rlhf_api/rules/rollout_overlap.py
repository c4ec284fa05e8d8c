"""Rules of `spec.rollout.overlapTraining`: an iteration that decodes while the one before is trained on.

One rule holds what it needs, as each rule of its own takes bytes of a definition that has few left. That an algorithm
generates at all is a rule of `absent_groups`.
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
"""(field, value that it needs): devices of its own for either side, all models trained beside decoding, and nothing
carried, which would be older still."""
_EVERY: Final = "spec.checkpoints.every"
"""An iteration before a checkpoint trains beside nothing: with one after each the field would do nothing."""


def of_rollout_overlap() -> Iterator[Rule]:
    """Yield the rule of decoding beside training."""
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
