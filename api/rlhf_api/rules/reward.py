"""Rules of a reward's variables and headers (exactly one value each, distinct names), calls and judge."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.rules.rule import Rule, Values

CALLS: Final = "must be Sample with a model or a judge, which receive the responses that they need regardless"
BY_NAME: Final = "each.name"
"""CEL of the name of a variable."""
_LISTS: Final = (
    ("function", "env", BY_NAME, str),
    ("endpoint", "headers", "each.name.lowerAscii()", lambda name: name.lower()),
    ("judge.endpoint", "headers", "each.name.lowerAscii()", lambda name: name.lower()),
)
"""(member of a source, its list, CEL and Python of the key of its members): headers ignore case."""


def of_reward() -> Iterator[Rule]:
    """Yield the rules of each single reward and cost."""
    for role in ModelRole:
        if role.kind is ModelKind.REWARD:
            yield from _of_source(role.manifest_path)


def _of_source(path: str) -> Iterator[Rule]:
    for member, name, key, known_by in _LISTS:
        yield from of_settings(f"{path}.{member}", name, key, known_by)
    field, called = f"{path}.calls", (f"{path}.function", f"{path}.endpoint")
    yield Rule(
        field=field,
        node=path,
        cel="has(self.function) || has(self.endpoint) || self.calls == 'Sample'",
        holds=lambda values: any(map(values.has, called)) or not values.has(path) or values[field] == "Sample",
        message=CALLS,
    )
    yield from _of_judge(f"{path}.judge")


def of_settings(node: str, name: str, key: str = BY_NAME, known_by: Callable[[str], str] = str) -> Iterator[Rule]:
    """Yield the rules of a list of variables or headers of `node`; `key` and `known_by` as in _LISTS."""
    yield _one_value(node, name)
    yield _different(node, name, key, known_by)


def _of_judge(path: str) -> Iterator[Rule]:
    for name, cel, holds, message in JUDGE:
        yield Rule(
            field=f"{path}.{name}",
            node=path,
            cel=cel.replace("JUDGE", "self"),
            holds=lambda values, holds=holds: not values.has(path) or holds(values[path]),  # type: ignore[misc]
            message=message,
        )


def _has_places(judge: Mapping[str, Any]) -> bool:
    template = judge.get("template")
    places = ("{response}",) if judge.get("method", "Direct") == "Direct" else ("{first}", "{second}")
    return template is None or all(place in template for place in places)


_PLACES: Final = (
    "!has(JUDGE.template) || (JUDGE.method == 'Direct' ? JUDGE.template.contains('{response}') : "
    "JUDGE.template.contains('{first}') && JUDGE.template.contains('{second}'))"
)
JUDGE: Final[tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool], str], ...]] = (
    (
        "maximum",
        "JUDGE.minimum < JUDGE.maximum",
        lambda judge: judge.get("minimum", 1) < judge.get("maximum", 9),
        "must be above minimum",
    ),
    (
        "read",
        "JUDGE.read == 'Probabilities' || has(JUDGE.endpoint)",
        lambda judge: judge.get("read", "Probabilities") == "Probabilities" or judge.get("endpoint") is not None,
        "Answer needs a judge at an endpoint: a model of the job gives probabilities",
    ),
    (
        "template",
        _PLACES,
        _has_places,
        "must hold {response}, or with method Pairwise {first} and {second}",
    ),
)
"""(member of a judge, CEL over JUDGE, the same in Python over the judge's fields, message)."""


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
