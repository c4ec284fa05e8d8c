"""Rules of `spec.training.lora`: a backend with adapters, distinct linear maps, a trunk that can be shared."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.rules.common_rules import each_once
from rlhf_api.rules.rule import Rule, Values

_NODE: Final = "spec.training.lora"
_TRUNK: Final = f"{_NODE}.trunk"


def of_lora() -> Iterator[Rule]:
    """Yield the rules of adapters."""
    yield Rule(
        field=_NODE,
        node="spec.training",
        cel="!has(self.lora) || self.backend == 'torch'",
        holds=lambda values: not values.has(_NODE) or values["spec.training.backend"] == "torch",
        message="must be unset with spec.training.backend megatron, which trains all weights: use torch for adapters",
    )
    yield each_once(f"{_NODE}.targetModules", "must name each linear map once: remove the second of a kind")
    yield _shared_needs("publish", "Adapters", "because merged models do not share weights")
    yield _shared_needs("models", "All", "because a critic without adapters has no frozen weights")
    for role in ModelRole:
        if role.kind is not ModelKind.REWARD and role is not GENERATE.model:
            yield _one_folder(role)


def _shared_needs(name: str, value: str, why: str) -> Rule:
    field = f"{_NODE}.{name}"
    return Rule(
        field=_TRUNK,
        node=_NODE,
        cel=f"self.trunk != 'Shared' || self.{name} == '{value}'",
        holds=lambda values: values[_TRUNK] != "Shared" or values[field] == value,
        message=f"can be Shared with {field}: {value} only, {why}: set that, or use Separate",
    )


def _one_folder(role: ModelRole) -> Rule:
    ours, actors = f"{role.manifest_path}.path", f"{GENERATE.model.manifest_path}.path"
    node = role.manifest_path
    name = node.removeprefix("spec.models.")

    def holds(values: Values) -> bool:
        shared = values.has(_NODE) and values[_TRUNK] == "Shared"
        return not shared or not values.has(node) or values[ours] == values[actors]

    return Rule(
        field=_TRUNK,
        node="spec",
        cel=f"!has(self.training.lora) || self.training.lora.trunk != 'Shared' || !has(self.models.{name}) "
        f"|| self.models.{name}.path == self.models.actor.path",
        holds=holds,
        message=f"can be Shared only where {ours} is that of the actor, or unset: use one folder, or Separate",
    )
