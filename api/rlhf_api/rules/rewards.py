"""Rules of `spec.models.rewards` and `spec.rewardShaping`.

The CEL of rewards covers the whole list, since a rule's node is a single object: `each` is a reward.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rlhf_api.api_model import ApiModel
from rlhf_api.job.rewards import NamedReward
from rlhf_api.rules.reward import CALLS, JUDGE
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.structural_schema import model_in

FIELD: Final = "spec.models.rewards"
_SETTINGS: Final = (
    (("function",), "env", "name"),
    (("endpoint",), "headers", "name.lowerAscii()"),
    (("judge", "endpoint"), "headers", "name.lowerAscii()"),
)
"""(member, its list of names with values, CEL of the key of these): headers ignore case."""
_PATHS: Final = ((("model",), "path"), (("function",), "file"), (("judge", "model"), "path"))
_MARK: Final = "://"
_RESERVED: Final = frozenset({"function"})
"""Field names that are keywords of CEL."""

Member = Mapping[str, Any]


def of_rewards() -> Iterator[Rule]:
    """Yield the rules of several rewards and of reward shaping."""
    yield from _unions(NamedReward, ())
    for member, name, key in _SETTINGS:
        yield from _settings(member, name, key)
    yield _of_each(
        "has(each.__function__) || has(each.endpoint) || each.calls == 'Sample'",
        lambda reward: bool(reward.get("function") or reward.get("endpoint")) or reward.get("calls") == "Sample",
        f"calls: {CALLS}",
    )
    for name, cel, holds, message in JUDGE:
        yield _of_each(
            f"!has(each.judge) || ({cel.replace('JUDGE', 'each.judge')})",
            lambda reward, holds=holds: reward.get("judge") is None or holds(reward["judge"]),  # type: ignore[misc]
            f"judge.{name}: {message}",
        )
    for member, name in _PATHS:
        yield _path(member, name)
    yield Rule(
        field=FIELD,
        node="spec.models",
        cel="!has(self.rewards) || self.rewards.all(each, self.rewards.exists_one(other, other.name == each.name))",
        holds=lambda values: _different([each["name"] for each in _rewards(values)]),
        message="must have different names",
    )
    yield from _shaping()
    yield from _bounds()


def _shaping() -> Iterator[Rule]:
    combine = "spec.rewardShaping.combine"
    yield Rule(
        field=combine,
        node="spec",
        cel="self.rewardShaping.combine == 'Sum' || has(self.models.rewards)",
        holds=lambda values: values[combine] == "Sum" or values.has(FIELD),
        message=f"is read only with {FIELD}: give several rewards, or remove it",
    )
    yield Rule(
        field=combine,
        node="spec",
        cel="self.rewardShaping.combine != 'MeanMinusVariance' || !has(self.models.rewards) || "
        "self.models.rewards.all(each, each.weight > 0.0)",
        holds=lambda values: (
            values[combine] != "MeanMinusVariance" or all(each["weight"] > 0 for each in _rewards(values))
        ),
        message="MeanMinusVariance needs weights above 0, as it divides by their sum",
    )


def _bounds() -> Iterator[Rule]:
    shaping = "spec.rewardShaping"
    minimum, maximum, buffer = (f"{shaping}.{name}" for name in ("minimum", "maximum", "overlongBuffer"))
    longest = "spec.rollout.maxResponseTokens"
    yield Rule(
        field=minimum,
        node=shaping,
        cel="!has(self.minimum) || !has(self.maximum) || self.minimum <= self.maximum",
        holds=lambda values: not values.has(minimum) or not values.has(maximum) or values[minimum] <= values[maximum],
        message=f"must be at most {maximum}",
    )
    yield Rule(
        field=buffer,
        node="spec",
        cel="self.rewardShaping.overlongBuffer <= self.rollout.maxResponseTokens",
        holds=lambda values: values[buffer] <= values[longest],
        message=f"must be at most {longest}, because it is the end of a response",
    )


def _unions(model: type[ApiModel], path: tuple[str, ...]) -> Iterator[Rule]:
    """Yield a rule for each union within a reward, as the models declare them."""
    if model.exactly_one:
        members = tuple(model.model_fields[name].alias or name for name in model.exactly_one)

        def holds(reward: Member, members: tuple[str, ...] = members) -> bool:
            node = _at(reward, path)
            return node is None or sum(node.get(member) is not None for member in members) == 1

        guard = _guard(path)
        chosen = ", ".join(f"has({_cel((*path, member))})" for member in members)
        prefix = f"{'.'.join(path)}: " if path else ""
        message = f"{prefix}exactly one of {', '.join(members)} must be set"
        yield _of_each(f"{guard}[{chosen}].filter(x, x).size() == 1", holds, message)
    for field in model.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None and issubclass(inner, ApiModel):
            assert field.alias is not None
            yield from _unions(inner, (*path, field.alias))


def _guard(path: tuple[str, ...]) -> str:
    """Return the start of a statement about the rewards that have a node set."""
    return "".join(f"!has({_cel(path[: end + 1])}) || " for end in range(len(path)))


def _cel(path: tuple[str, ...]) -> str:
    """Return a path within a reward in CEL, with CEL keywords escaped.

    Under a plain keyword the API server does not find the length limit of a list, so it cannot bound the cost of a
    rule.
    """
    return ".".join(("each", *(f"__{name}__" if name in _RESERVED else name for name in path)))


def _settings(path: tuple[str, ...], name: str, key: str) -> Iterator[Rule]:
    member, guard = ".".join(path), _guard(path)
    listed = _cel((*path, name))

    def entries(reward: Member) -> list[Member]:
        return list((_at(reward, path) or {}).get(name) or ())

    def have_values(reward: Member) -> bool:
        return all((entry.get("value") is None) != (entry.get("secretKeyRef") is None) for entry in entries(reward))

    def differ(reward: Member) -> bool:
        names = [entry["name"] for entry in entries(reward)]
        return _different([entry.lower() for entry in names] if "lower" in key else names)

    cel = f"{guard}{listed}.all(item, has(item.value) != has(item.secretKeyRef))"
    yield _of_each(cel, have_values, f"{member}.{name}: every member needs one of value, secretKeyRef")
    cel = f"{guard}{listed}.all(item, {listed}.exists_one(other, other.{key} == item.{key}))"
    yield _of_each(cel, differ, f"{member}.{name}: must have different names")


def _path(path: tuple[str, ...], name: str) -> Rule:
    member = ".".join(path)

    def holds(reward: Member) -> bool:
        return _MARK not in ((_at(reward, path) or {}).get(name) or "")

    guard = _guard((*path, name))
    message = f"{member}.{name}: must be a path, as addresses such as s3:// are not opened: mount a volume"
    return _of_each(f"{guard}!{_cel((*path, name))}.contains('{_MARK}')", holds, message)


def _of_each(cel: str, holds: Callable[[Member], bool], message: str) -> Rule:
    """Return the rule that a statement holds for each reward; its message names the first for which it fails."""

    def says(values: Values) -> str:
        wrong = next(each for each in _rewards(values) if not holds(each))
        return f"{wrong['name']}: {message}"

    return Rule(
        field=FIELD,
        node="spec.models",
        cel=f"!has(self.rewards) || self.rewards.all(each, {cel})",
        holds=lambda values: all(map(holds, _rewards(values))),
        message=message,
        message_cel=f"'%s: {message}'.format([self.rewards.filter(each, !({cel}))[0].name])",
        says=says,
    )


def _rewards(values: Values) -> list[Member]:
    return list(values[FIELD]) if values.has(FIELD) else []


def _at(reward: Member, path: tuple[str, ...]) -> Member | None:
    node: Any = reward
    for name in path:
        node = node.get(name) if node is not None else None
    return node if node is None else dict(node)


def _different(names: list[str]) -> bool:
    return len(set(names)) == len(names)
