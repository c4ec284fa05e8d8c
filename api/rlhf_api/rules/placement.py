"""Rules of `spec.placement`: requirements of Colocated, and training fields that it does not use."""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_api.job.groups import GroupFields
from rlhf_api.rules.common_rules import number_of_ranks, ranks_in_cel, ranks_in_words
from rlhf_api.rules.rule import Rule, Values

_AXES: Final = ("pipeline", "data", "context")
"""Axes of the training ranks with Colocated, where other rules exclude stages in parts."""
_DEDICATED: Final = "self.placement == 'Dedicated'"


def _dedicated(values: Values) -> bool:
    return bool(values["spec.placement"] == "Dedicated")


def of_placement() -> Iterator[Rule]:
    """Yield the rules of placement."""
    ranks_cel = ranks_in_cel("self.training.parallelism", _AXES)
    field = "spec.generation.replicas"
    need = f"must be at least {ranks_in_words(_AXES)} of spec.training.parallelism with spec.placement Colocated,"
    remedy = "as rank r runs in generation worker r"
    yield Rule(
        field=field,
        node="spec",
        cel=f"{_DEDICATED} || self.suspend || {ranks_cel} <= self.generation.replicas",
        holds=lambda values: (
            _dedicated(values) or values["spec.suspend"] or number_of_ranks(values, _AXES) <= values[field]
        ),
        message=f"{need} {remedy}",
        message_cel=f"'{need} {remedy}: use %d or more, or fewer ranks'.format([{ranks_cel}])",
        says=lambda values: f"{need} {remedy}: use {number_of_ranks(values, _AXES)} or more, or fewer ranks",
    )
    yield _as_generation("gpusPerReplica")
    yield _as_generation("cpuThreads")
    yield _no_group()


def _no_group() -> Rule:
    """Return the rule against failure rules of a group without pods, which would never match."""
    field = "spec.runPolicy.failurePolicy.rules"
    return Rule(
        field=field,
        node="spec",
        cel=(
            f"{_DEDICATED} || !self.runPolicy.failurePolicy.rules.exists(rule,"
            " has(rule.groups) && 'training' in rule.groups)"
        ),
        holds=lambda values: (
            _dedicated(values) or not any("training" in (rule.get("groups") or ()) for rule in values[field])
        ),
        message="must not name group training, which has no pods with spec.placement Colocated: name generation",
    )


def _as_generation(name: str) -> Rule:
    """Return the rule of a process setting that belongs to the generation worker: training leaves it unset or equal."""
    field, theirs = f"spec.training.{name}", f"spec.generation.{name}"
    default: Any = next(other.default for other in GroupFields.model_fields.values() if other.alias == name)
    return Rule(
        field=field,
        node="spec",
        cel=f"{_DEDICATED} || self.training.{name} in [{default}, self.generation.{name}]",
        holds=lambda values: _dedicated(values) or values[field] in (default, values[theirs]),
        message=f"is that of generation workers with spec.placement Colocated: leave it out, or use that of {theirs}",
    )
