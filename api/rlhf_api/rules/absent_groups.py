"""Rules for algorithms whose graph has no task in a group.

The group has no workers, so other values of the fields in `_UNUSED` than those listed there are rejected.
"""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_api.algorithms import ALGORITHMS, full_graph, without
from rlhf_api.rules.rule import Rule, Values
from rlhf_common.names import Group

_OFF: Final = ("Disabled", "Auto")
"""Modes without effect if there is nothing to do."""
_UNUSED: Final[dict[Group, tuple[tuple[str, tuple[Any, ...]], ...]]] = {
    Group.GENERATION: (
        ("spec.placement", ("Dedicated",)),
        ("spec.rollout.temperature", (1.0,)),
        ("spec.rollout.oversample", (0,)),
        ("spec.rollout.longRounds", ("Disabled",)),
        ("spec.prompts.lengthWindow", (1, 0)),
        ("spec.rollout.overlapTraining", ("Disabled",)),
        ("spec.generation.replicas", (0, 1)),
        ("spec.generation.gpusPerReplica", (0,)),
        ("spec.generation.engine", ("Auto",)),
        ("spec.generation.speculation.mode", _OFF),
        ("spec.generation.speculation.ahead", ("Disabled",)),
        ("spec.inference.incremental", _OFF),
        ("spec.fusion.interStage.mode", _OFF),
    ),
    Group.INFERENCE: (("spec.inference.replicas", (0, 1)), ("spec.inference.gpusPerReplica", (0,))),
}
"""Group -> (field, its allowed values if the group does not exist; the last one is the default) of some fields."""


def of_absent_groups() -> Iterator[Rule]:
    """Yield the rules about groups that an algorithm does not have, and about needed workers and rewards."""
    for group, fields in _UNUSED.items():
        names = without(group)
        for field, values in fields:
            yield _unused(group, names, field, values)
    yield _scores_somewhere()
    yield _replicas(Group.GENERATION)
    yield _reward()


def _is_without(group: Group, values: Values) -> bool:
    """Return whether the algorithm of a manifest has no task in a group."""
    return _is_one_of(without(group), values)


def _is_without_cel(group: Group) -> str:
    """Return the CEL of `_is_without`, over the spec."""
    return _any_of(without(group))


def _is_one_of(names: tuple[str, ...], values: Values) -> bool:
    """Return whether a manifest has one of these algorithms."""
    return any(values.has(f"spec.algorithm.{name}") for name in names)


def _any_of(names: tuple[str, ...]) -> str:
    """Return the CEL of `_is_one_of`, over the spec."""
    return f"({' || '.join(f'has(self.algorithm.{name})' for name in names)})"


def _cel(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _unused(group: Group, names: tuple[str, ...], field: str, allowed: tuple[Any, ...]) -> Rule:
    listed = ", ".join(map(_cel, allowed))
    return Rule(
        field=field,
        node="spec",
        cel=f"!{_any_of(names)} || {field.replace('spec.', 'self.', 1)} in [{listed}]",
        holds=lambda values: not _is_without(group, values) or values[field] in allowed,
        message=f"has no meaning with {' or '.join(names)}, which has no {group} workers: leave it out",
    )


def _scores_somewhere() -> Rule:
    """Return the rule that a job without generation has an inference worker if it scores, unless it is suspended."""
    names = tuple(name for name in without(Group.GENERATION) if full_graph(name).tasks_of(Group.INFERENCE))
    field = "spec.inference.replicas"
    return Rule(
        field=field,
        node="spec",
        cel=f"!{_any_of(names)} || self.suspend || self.inference.replicas >= 1",
        holds=lambda values: not _is_one_of(names, values) or values["spec.suspend"] or values[field] >= 1,
        message=(
            f"must be at least 1 with algorithm {' or '.join(names)}, which has no generation workers that could score "
            "instead: use 1, or pause the job with spec.suspend: true"
        ),
    )


def _reward() -> Rule:
    names = tuple(name for name in ALGORITHMS if full_graph(name).reward_fields)
    field = "spec.models.reward"
    return Rule(
        field=field,
        node="spec",
        cel=f"!{_any_of(names)} || has(self.models.reward) || has(self.models.rewards)",
        holds=lambda values: not _is_one_of(names, values) or values.has(field) or values.has(f"{field}s"),
        message="is required by algorithms that score responses: add it, or spec.models.rewards for several",
    )


def _replicas(group: Group) -> Rule:
    """Return the rule that a group has a worker, unless the job is suspended or its algorithm has no such group."""
    field = f"spec.{group}.replicas"
    return Rule(
        field=field,
        node="spec",
        cel=f"self.suspend || {_is_without_cel(group)} || self.{group}.replicas >= 1",
        holds=lambda values: values["spec.suspend"] or _is_without(group, values) or values[field] >= 1,
        message="must be at least 1 in a job that is not suspended: use 1, or pause the job with spec.suspend: true",
    )
