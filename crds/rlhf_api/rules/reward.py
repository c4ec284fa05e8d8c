"""Rules of a reward's variables and headers: each has exactly one value, and a name of its own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rlhf_api.rules.rule import Rule, Values

_LISTS: Final = (
    ("spec.models.reward.function", "env", "each.name", lambda name: name),
    ("spec.models.reward.endpoint", "headers", "each.name.lowerAscii()", lambda name: name.lower()),
)
"""(node, its list, CEL and Python of what tells its members apart): headers ignore case."""


def of_reward() -> Iterator[Rule]:
    """Yield every rule about variables and headers."""
    for node, name, key, known_by in _LISTS:
        yield _one_value(node, name)
        yield _different(node, name, key, known_by)


def _one_value(node: str, name: str) -> Rule:
    field = f"{node}.{name}"

    def has_one_value(member: Mapping[str, Any]) -> bool:
        return (member.get("value") is None) != (member.get("secretKeyRef") is None)

    def says(values: Values) -> str:
        wrong = next(member["name"] for member in values[field] if not has_one_value(member))
        return f"{wrong}: needs one of value, secretKeyRef"

    return Rule(
        field=field,
        node=node,
        cel=f"self.{name}.all(each, has(each.value) != has(each.secretKeyRef))",
        holds=lambda values: all(has_one_value(member) for member in values[field]),
        message="every member needs one of value, secretKeyRef",
        message_cel=f"'%s: needs one of value, secretKeyRef'.format([self.{name}.filter(each, has(each.value) == "
        "has(each.secretKeyRef))[0].name])",
        says=says,
    )


def _different(node: str, name: str, key: str, known_by: Callable[[str], str]) -> Rule:
    field = f"{node}.{name}"

    def holds(values: Values) -> bool:
        names = [known_by(member["name"]) for member in values[field]]
        return len(set(names)) == len(names)

    other = key.replace("each", "other")
    return Rule(
        field=field,
        node=node,
        cel=f"self.{name}.all(each, self.{name}.exists_one(other, {other} == {key}))",
        holds=holds,
        message="must have different names",
    )
