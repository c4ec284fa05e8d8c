"""Rules of `spec.prompts` and `spec.evaluation.prompts`: what is said of a chat template has one to be said of,
and sources have names of their own and are files."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from rlhf_api.rules.rule import Rule, Values

NODES: Final = ("spec.prompts", "spec.evaluation.prompts")
_OF_TEMPLATE: Final = ("chatTemplateFile", "chatTemplateArguments", "systemMessage")


def of_prompts() -> Iterator[Rule]:
    """Yield every rule of prompts."""
    for node in NODES:
        for name in _OF_TEMPLATE:
            yield _with_template(node, name)
        yield _of_sources(
            node,
            "self.sources.all(each, self.sources.exists_one(other, other.name == each.name))",
            lambda sources: len({each["name"] for each in sources}) == len(sources),
            "must have each name once, as metrics are told apart by it: rename one",
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


def _with_template(node: str, name: str) -> Rule:
    field = f"{node}.{name}"

    def holds(values: Values) -> bool:
        return not values.has(field) or values[f"{node}.chatTemplate"] is True

    return Rule(
        field=field,
        node=node,
        cel=f"!has(self.{name}) || self.chatTemplate",
        holds=holds,
        message=f"is read only with {node}.chatTemplate: set that to true, or remove it",
    )
