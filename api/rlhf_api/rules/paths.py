"""Rules of paths: they name files and folders of a file system, not addresses. `prompts` and `rewards` check lists."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from rlhf_api.rules.rule import Rule, Values

_PATHS: Final = (
    "spec.models.actor.path",
    "spec.models.critic.path",
    "spec.models.reference.path",
    "spec.models.reward.model.path",
    "spec.models.reward.function.file",
    "spec.models.reward.judge.model.path",
    "spec.models.cost.model.path",
    "spec.models.cost.function.file",
    "spec.models.cost.judge.model.path",
    "spec.models.costCritic.path",
    "spec.prompts.path",
    "spec.prompts.chatTemplateFile",
    "spec.rollout.environment.file",
    "spec.evaluation.prompts.path",
    "spec.evaluation.prompts.chatTemplateFile",
    "spec.generation.speculation.draftModel.path",
    "spec.training.lora.adapter",
    "spec.checkpoints.path",
)
_MARK: Final = "://"


def of_paths() -> Iterator[Rule]:
    """Yield a rule for each path in `_PATHS`."""
    yield from map(is_path, _PATHS)


def is_path(field: str) -> Rule:
    """Return the rule that a field is a path if it is set."""
    node, _, name = field.rpartition(".")
    return Rule(
        field=field,
        node=node,
        cel=f"!has(self.{name}) || !self.{name}.contains('{_MARK}')",
        holds=partial(_is_path, field),
        message="must be a path, as addresses such as s3:// are not opened: mount a volume",
    )


def _is_path(field: str, values: Values) -> bool:
    return not values.has(field) or _MARK not in values[field]
