"""Rules of `spec.training.stream`: gradients of complete prompt groups while other groups decode.

A streamed step is exact if the loss of a group depends on its own members, apart from a factor that is known at the
end, and if no weight changes before the batch is complete. Each rule names the values that this needs.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlhf_api.algorithms import ALGORITHMS
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import NO_DRAFT_TRAINED, trains_no_draft

FIELD: Final = "spec.training.stream"
STREAMED: Final = tuple(name for name, fields in ALGORITHMS.items() if fields.advantages_by_group)
"""Algorithms whose advantages depend on the responses to one prompt."""
_P: Final = "spec.training.parallelism"
_LAYOUT: Final[Sequence[tuple[str, Any]]] = (
    ("spec.placement", "Dedicated"),
    ("spec.training.backend", "torch"),
    (f"{_P}.pipeline", 1),
    (f"{_P}.context", 1),
    (f"{_P}.shard", 1),
    (f"{_P}.expert", 1),
)
"""(field, required value) of the processes; without them the ranks exchange data during a backward."""
_ROLLOUT: Final[Sequence[tuple[str, Any]]] = (
    ("spec.inference.overlap", "Enabled"),
    ("spec.rollout.oversample", 0),
    ("spec.rollout.longRounds", "Disabled"),
    ("spec.rollout.overlapTraining", "Disabled"),
)
"""(field, required value) so that a complete group belongs to the batch, and is scored before it is complete."""
_REWARDS: Final = "spec.rewardShaping"


def streaming_rules() -> Iterator[Rule]:
    """Yield the rules of gradients before the batch is complete."""
    chosen = " || ".join(f"has(self.algorithm.{name})" for name in STREAMED)
    yield _rule(
        f"({chosen})",
        lambda values: any(values.has(f"spec.algorithm.{name}") for name in STREAMED),
        f"needs an algorithm whose advantages depend on one prompt's responses: use {', '.join(STREAMED)}, or Disabled",
    )
    yield _all_of(_LAYOUT)
    yield _all_of(_ROLLOUT)
    yield _rule(
        "self.rewardShaping.normalize == 'None' && self.rewardShaping.combine != 'NormalizedSum'",
        lambda values: values[f"{_REWARDS}.normalize"] == "None" and values[f"{_REWARDS}.combine"] != "NormalizedSum",
        f"needs {_REWARDS}.normalize None and {_REWARDS}.combine other than NormalizedSum, which read the whole batch: "
        "set those, or use Disabled",
    )
    yield _rule(
        "!has(self.devices)",
        lambda values: not values.has("spec.devices"),
        "needs given sizes, as plans for spec.devices do not predict streaming: remove spec.devices, or use Disabled",
    )
    yield _rule(
        f"({NO_DRAFT_TRAINED})",
        trains_no_draft,
        "needs spec.generation.speculation.draftModel.train Disabled, as a draft model learns from whole mini-batches: "
        "set that, or use Disabled",
    )
    for name in STREAMED:
        yield from _one_step(name)


def _one_step(name: str) -> Iterator[Rule]:
    """Yield the rules by which an algorithm takes one step per iteration, with the log-probabilities of the engine."""
    path = f"spec.algorithm.{name}"
    below = path.replace("spec.", "self.", 1)
    yield _rule(
        f"(!has({below}) || {below}.epochs == 1 && {below}.miniBatchSize == self.rollout.batchSize)",
        lambda values: (
            not values.has(path)
            or (values[f"{path}.epochs"] == 1 and values[f"{path}.miniBatchSize"] == values["spec.rollout.batchSize"])
        ),
        f"needs one optimizer step per iteration: set {path}.epochs 1 and {path}.miniBatchSize to "
        "spec.rollout.batchSize, or use Disabled",
    )
    yield _rule(
        f"(!has({below}) || {below}.oldLogProbabilities == 'Engine')",
        lambda values: not values.has(path) or values[f"{path}.oldLogProbabilities"] == "Engine",
        f"needs {path}.oldLogProbabilities Engine, as Trainer passes over the whole batch: set that, or use Disabled",
    )


def _all_of(needed: Sequence[tuple[str, Any]]) -> Rule:
    """Return the rule that fields have these values."""
    cel = " && ".join(f"{field.replace('spec.', 'self.', 1)} == {_literal(value)}" for field, value in needed)
    words = ", ".join(f"{field} {value}" for field, value in needed)

    def holds(values: Values) -> bool:
        return all(values[field] == value for field, value in needed)

    return _rule(cel, holds, f"needs {words}: set those, or use Disabled")


def _rule(cel: str, holds: Any, message: str) -> Rule:
    """Return a rule of streaming jobs."""
    return Rule(
        field=FIELD,
        node="spec",
        cel=f"self.training.stream == 'Disabled' || {cel}",
        holds=lambda values: values[FIELD] == "Disabled" or holds(values),
        message=message,
    )


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
