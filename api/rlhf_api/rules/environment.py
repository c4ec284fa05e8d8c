"""Rules of `spec.rollout.environment`.

The job needs generation with an engine that can continue after text from others, and turns that end with a token.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.algorithms import ALGORITHMS, full_graph
from rlhf_api.rules.reward import of_settings
from rlhf_api.rules.rule import Rule, Values
from rlhf_common.names import Group

FIELD: Final = "spec.rollout.environment"
_ENGINES: Final = ("torch", "Auto")
_REWARD, _REWARDS, _COST = "spec.models.reward", "spec.models.rewards", "spec.models.cost"


def of_environment() -> Iterator[Rule]:
    """Yield the rules of environments."""
    without = tuple(name for name in ALGORITHMS if not full_graph(name).tasks_of(Group.GENERATION))
    has = " || ".join(f"has(self.algorithm.{name})" for name in without)
    yield Rule(
        field=FIELD,
        node="spec",
        cel=f"!has(self.rollout.environment) || !({has})",
        holds=lambda values: not values.has(FIELD) or not any(values.has(f"spec.algorithm.{name}") for name in without),
        message=f"needs generated responses, which {', '.join(without)} do not have: remove it",
    )
    yield _ENGINE
    yield _STOP
    yield _REWARD_OF
    yield _COST_OF
    yield from of_settings(FIELD, "env")


def _served(values: Values) -> bool:
    generation = "spec.generation"
    return values[f"{generation}.engine"] in _ENGINES and values[f"{generation}.parallelism.tensor"] == 1


def _asked(values: Values) -> bool:
    single = values.has(f"{_REWARD}.environment")
    several: list[Mapping[str, Any]] = list(values[_REWARDS]) if values.has(_REWARDS) else []
    return single or any(each.get("environment") is not None for each in several)


_ENGINE: Final = Rule(
    field=FIELD,
    node="spec",
    cel="!has(self.rollout.environment) || (self.generation.engine in ['torch', 'Auto'] && "
    "self.generation.parallelism.tensor == 1)",
    holds=lambda values: not values.has(FIELD) or _served(values),
    message="needs engine torch, because other engines cannot continue after the environment's tokens: set "
    "spec.generation.engine to torch and spec.generation.parallelism.tensor to 1",
)
_STOP: Final = Rule(
    field="spec.rollout.stop",
    node="spec",
    cel="!has(self.rollout.environment) || self.rollout.stop.size() == 0",
    holds=lambda values: not values.has(FIELD) or not values["spec.rollout.stop"],
    message=f"must be empty with {FIELD}, because stop strings would also match its answers: use stopTokenIds",
)
_REWARD_OF: Final = Rule(
    field=FIELD,
    node="spec",
    cel="has(self.rollout.environment) || ((!has(self.models.reward) || !has(self.models.reward.environment)) && "
    "(!has(self.models.rewards) || self.models.rewards.all(each, !has(each.environment))))",
    holds=lambda values: values.has(FIELD) or not _asked(values),
    message="must be set when a reward comes from the environment",
)
_COST_OF: Final = Rule(
    field=_COST,
    node="spec.models",
    cel="!has(self.cost) || !has(self.cost.environment)",
    holds=lambda values: not values.has(f"{_COST}.environment"),
    message="must not be the environment, which returns a reward but no cost: use function, model, endpoint or judge",
)
