"""One rule per union of the manifest outside lists: exactly one of its members is set, or at most one."""

from collections.abc import Iterator

from pydantic import BaseModel

from rlhf_api.api_model import ApiModel
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.structural_schema import model_in


def _union(node: str, members: tuple[str, ...]) -> Rule:
    """Return the rule that exactly one of `members` is set at `node`."""
    names = ", ".join(members)

    def set_members(values: Values) -> list[str]:
        assert values[node] is not None
        return [member for member in members if values.has(f"{node}.{member}")]

    def says(values: Values) -> str:
        members_given = set_members(values)
        remedy = (
            f"got {' and '.join(members_given)}: remove all but one"
            if members_given
            else f"got none: add one, such as {members[0]}"
        )
        return f"exactly one of {names} must be set, {remedy}"

    return Rule(
        field=node,
        node=node,
        cel=f"[{', '.join(f'has(self.{member})' for member in members)}].filter(x, x).size() == 1",
        holds=lambda values: len(set_members(values)) == 1,
        message=f"exactly one of {names} must be set",
        says=says,
    )


def _exclusion(node: str, members: tuple[str, ...]) -> Rule:
    """Return the rule that at most one of `members` is set at `node`."""
    message = f"at most one of {', '.join(members)} may be set: remove the others"
    return Rule(
        field=node,
        node=node,
        cel=f"[{', '.join(f'has(self.{member})' for member in members)}].filter(x, x).size() <= 1",
        holds=lambda values: sum(values.has(f"{node}.{member}") for member in members) <= 1,
        message=message,
    )


def unions(model: type[BaseModel], path: str) -> Iterator[Rule]:
    """Yield a rule for each union of a model and of the models in its fields, without models in lists."""
    if issubclass(model, ApiModel) and model.exactly_one:
        yield _union(path, tuple(model.model_fields[name].alias or name for name in model.exactly_one))
    if issubclass(model, ApiModel) and model.at_most_one:
        yield _exclusion(path, tuple(model.model_fields[name].alias or name for name in model.at_most_one))
    for field in model.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None:
            yield from unions(inner, f"{path}.{field.alias}")
