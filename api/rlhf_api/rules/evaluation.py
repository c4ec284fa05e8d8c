"""Rules of `spec.evaluation`.

Several responses to a prompt need random sampling, or they would be identical.
"""

from collections.abc import Iterator
from typing import Final

from rlhf_api.algorithms import ALGORITHMS, full_graph
from rlhf_api.rules.common_rules import greedy_or_random
from rlhf_api.rules.rule import Rule, Values
from rlhf_common.names import Group

_NODE: Final = "spec.evaluation"
_COUNT: Final = f"{_NODE}.samplesPerPrompt"
_TEMPERATURE: Final = f"{_NODE}.temperature"


def of_evaluation() -> Iterator[Rule]:
    """Yield the rules of evaluation."""
    yield _needs_judge(tuple(name for name in ALGORITHMS if not _is_judged(name)))
    yield _OF_SINGLE
    yield greedy_or_random(_TEMPERATURE, _NODE)
    yield Rule(
        field=_TEMPERATURE,
        node=_NODE,
        cel="self.samplesPerPrompt == 1 || self.temperature > 0.0",
        holds=lambda values: not values.has(_NODE) or values[_COUNT] == 1 or values[_TEMPERATURE] > 0,
        message=f"must be above 0 with {_COUNT} above 1, or all responses to a prompt are the same: use 1.0",
    )


def _is_judged(algorithm: str) -> bool:
    """Return whether an algorithm decodes responses and judges them."""
    graph = full_graph(algorithm)
    return bool(graph.tasks_of(Group.GENERATION)) and any(task.rewards for task in graph.tasks)


def _needs_judge(without: tuple[str, ...]) -> Rule:
    """Return the rule that a job without generation or rewards has no evaluation."""
    has = " || ".join(f"has(self.algorithm.{name})" for name in without)
    return Rule(
        field=_NODE,
        node="spec",
        cel=f"!has(self.evaluation) || !({has})",
        holds=lambda values: not values.has(_NODE) or not any(values.has(f"spec.algorithm.{name}") for name in without),
        message=f"needs generated responses with rewards, which {', '.join(without)} do not have: remove it",
    )


def _needs_groups(values: Values) -> bool:
    """Return whether any reward of the job needs all responses to a prompt.

    Reads the fields that decide, so that another invalid field hides nothing.
    """
    single, several = "spec.models.reward", "spec.models.rewards"
    if values.has(single) and values[f"{single}.calls"] == "Group":
        return True
    if values.has(f"{single}.judge") and values[f"{single}.judge.method"] == "Pairwise":
        return True
    rewards = values[several] if values.has(several) else ()
    return any(
        each.get("calls") == "Group" or (each.get("judge") or {}).get("method") == "Pairwise" for each in rewards
    )


_OF_SINGLE: Final = Rule(
    field=_NODE,
    node="spec",
    cel="!has(self.evaluation) || ((!has(self.models.reward) || (self.models.reward.calls != 'Group' && "
    "(!has(self.models.reward.judge) || self.models.reward.judge.method != 'Pairwise'))) && "
    "(!has(self.models.rewards) || self.models.rewards.all(each, each.calls != 'Group' && "
    "(!has(each.judge) || each.judge.method != 'Pairwise'))))",
    holds=lambda values: not values.has(_NODE) or not _needs_groups(values),
    message="needs rewards of single responses: set calls to Sample or Batch and judge.method to Direct, or remove it",
)
