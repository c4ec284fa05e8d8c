"""Rules of `spec.prompts` and `spec.evaluation.prompts`.

Prompts of an evaluation are checked together with inherited fields.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from rlhf_api.rules.rule import Rule, Values

JOB, EVALUATION = "spec.prompts", "spec.evaluation.prompts"
NODES: Final = (JOB, EVALUATION)
_OF_TEMPLATE: Final = ("chatTemplateFile", "chatTemplateArguments", "systemMessage")


def of_prompts() -> Iterator[Rule]:
    """Yield the rules of prompts."""
    for name in _OF_TEMPLATE:
        yield _with_template(name)
    yield _EVALUATED_WITH_TEMPLATE
    for node in NODES:
        yield _of_sources(
            node,
            "self.sources.all(each, self.sources.exists_one(other, other.name == each.name))",
            lambda sources: len({each["name"] for each in sources}) == len(sources),
            "must have each name once, because metrics are labelled by name: rename one",
        )
        yield _of_sources(
            node,
            "self.sources.all(each, !each.path.contains('://'))",
            lambda sources: not any("://" in each["path"] for each in sources),
            "must be paths, as addresses such as s3:// are not opened: mount a volume that holds the files",
        )


def _of_sources(node: str, cel: str, right: Callable[[list[dict[str, Any]]], bool], message: str) -> Rule:
    field = f"{node}.sources"
    return Rule(
        field=field,
        node=node,
        cel=f"!has(self.sources) || {cel}",
        holds=lambda values: not values.has(field) or right(values[field]),
        message=message,
    )


def _with_template(name: str) -> Rule:
    field, flag = f"{JOB}.{name}", f"{JOB}.chatTemplate"
    return Rule(
        field=field,
        node=JOB,
        cel=f"!has(self.{name}) || self.chatTemplate",
        holds=lambda values: not values.has(field) or values[flag] is True,
        message=f"is read only with {flag}: set that to true, or remove it",
    )


def _evaluated_with_template(values: Values) -> bool:
    flag = f"{EVALUATION}.chatTemplate"
    settings = any(values.has(f"{EVALUATION}.{name}") for name in _OF_TEMPLATE)
    return not settings or values[flag if values.has(flag) else f"{JOB}.chatTemplate"] is True


_EVALUATED_WITH_TEMPLATE: Final = Rule(
    field=f"{EVALUATION}.chatTemplate",
    node="spec",
    cel="!has(self.evaluation) || !has(self.evaluation.prompts) || "
    "self.evaluation.prompts.?chatTemplate.orValue(self.prompts.chatTemplate) || "
    f"!({' || '.join(f'has(self.evaluation.prompts.{name})' for name in _OF_TEMPLATE)})",
    holds=_evaluated_with_template,
    message=f"must be true for {', '.join(_OF_TEMPLATE)}, which are read only with it: set it, or remove them",
)
"""Rule that evaluation prompts have no chat settings unless a chat template is set or inherited."""
