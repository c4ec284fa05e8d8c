"""Rules of `spec.runPolicy.failurePolicy`: statements about every list member, reported with its name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rlhf_api.job.failure import START_UP
from rlhf_api.rules.rule import Rule, Values
from rlhf_common.names import ExitCode

_NODE: Final = "spec.runPolicy.failurePolicy"
_FIELD: Final = f"{_NODE}.rules"

_MATCHES: Final = ("onExitCodes", "onPodConditions", "onPodFailure")
"""Fields with which a failure rule matches ends."""

Member = Mapping[str, Any]


def _of_every_rule(cel: str, holds: Callable[[Member], bool], message: str) -> Rule:
    """Return a statement that must hold for every failure rule; `cel` is an expression over `rule`."""

    def wrong(values: Values) -> list[Member]:
        return [member for member in values[_FIELD] if not holds(member)]

    return Rule(
        field=_FIELD,
        node=_NODE,
        cel=f"self.rules.all(rule, {cel})",
        holds=lambda values: not wrong(values),
        message=f"a rule {message}",
        message_cel=f"'rule %s: {message}'.format([self.rules.filter(rule, !({cel}))[0].name])",
        says=lambda values: f"rule {wrong(values)[0]['name']}: {message}",
    )


def _distinct(values: Values) -> bool:
    names = [member["name"] for member in values[_FIELD]]
    return len(set(names)) == len(names)


def _asks_for_restart(rule: Member) -> bool:
    codes = rule.get("onExitCodes")
    return codes is not None and codes["operator"] == "In" and int(ExitCode.RESTART) in codes["values"]


def _names_start_up(rule: Member) -> bool:
    return any(condition["type"] in START_UP for condition in rule.get("onPodConditions") or [])


def _says_nothing(rule: Member) -> bool:
    pattern = rule.get("onPodFailure")
    return pattern is not None and pattern.get("reasons") is None and pattern.get("message") is None


def of_failure_policy() -> Iterator[Rule]:
    """Yield the rules about failure rules."""
    presence_checks = ", ".join(f"has(rule.{name})" for name in _MATCHES)
    yield _of_every_rule(
        f"[{presence_checks}].exists_one(given, given)",
        lambda rule: sum(rule.get(name) is not None for name in _MATCHES) == 1,
        f"needs exactly one of {', '.join(_MATCHES)}",
    )
    yield _of_every_rule(
        "!has(rule.onPodFailure) || has(rule.onPodFailure.reasons) || has(rule.onPodFailure.message)",
        lambda rule: not _says_nothing(rule),
        "needs reasons, message or both in onPodFailure: such as reasons: [Evicted]",
    )
    yield _of_every_rule(
        'rule.action != "FailJob" || rule.scope == "Pod"',
        lambda rule: rule["action"] != "FailJob" or rule["scope"] == "Pod",
        "must not have a scope with action FailJob, which restarts nothing: remove scope",
    )
    yield _of_every_rule(
        f'!has(rule.onExitCodes) || rule.onExitCodes.operator != "In" || '
        f"!({int(ExitCode.RESTART)} in rule.onExitCodes.values)",
        lambda rule: not _asks_for_restart(rule),
        f"must not name exit code {int(ExitCode.RESTART)}, with which a process asks for a restart: remove it",
    )
    start_up = ", ".join(f'"{condition}"' for condition in START_UP)
    yield _of_every_rule(
        f"!has(rule.onPodConditions) || !rule.onPodConditions.exists(each, each.type in [{start_up}])",
        lambda rule: not _names_start_up(rule),
        f"must not name a condition that every pod goes through ({', '.join(START_UP)}): use DisruptionTarget, or one "
        "that is set on broken pods",
    )
    yield Rule(
        field=_FIELD,
        node=_NODE,
        cel="self.rules.all(rule, self.rules.exists_one(other, other.name == rule.name))",
        holds=_distinct,
        message="rules must have different names, as conditions and events name them",
    )
