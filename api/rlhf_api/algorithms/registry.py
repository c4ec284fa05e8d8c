"""All algorithms by their member name in `spec.algorithm`, and questions about the algorithm of a job.

To add one: a module in this package, a line here, and the module of the same name in `rlhf_workers.algorithms`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Protocol

from rlhf_api.algorithms.cispo import CISPO
from rlhf_api.algorithms.combination import Combination
from rlhf_api.algorithms.dapo import DAPO
from rlhf_api.algorithms.dpo import DPO
from rlhf_api.algorithms.fields import AlgorithmFields
from rlhf_api.algorithms.graph import Graph, NamedField, RewardPart, SampleField, Scope, Task
from rlhf_api.algorithms.grpo import GRPO
from rlhf_api.algorithms.gspo import GSPO
from rlhf_api.algorithms.iteration_prompts import PromptSchedule, PromptSchedules, Surplus, most_surplus
from rlhf_api.algorithms.online_dpo import OnlineDPO
from rlhf_api.algorithms.plugin import AlgorithmPlugin
from rlhf_api.algorithms.ppo import PPO
from rlhf_api.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rlhf_api.algorithms.remax import ReMax
from rlhf_api.algorithms.reward_model import RewardModel
from rlhf_api.algorithms.rloo import RLOO
from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.algorithms.safe_rlhf import SafeRLHF
from rlhf_api.algorithms.sft import SFT
from rlhf_common.names import Group

ALGORITHMS: Final[Mapping[str, type[AlgorithmFields]]] = MappingProxyType(
    {
        "ppo": PPO,
        "grpo": GRPO,
        "rloo": RLOO,
        "reinforcePlusPlus": ReinforcePlusPlus,
        "remax": ReMax,
        "gspo": GSPO,
        "cispo": CISPO,
        "dapo": DAPO,
        "safeRlhf": SafeRLHF,
        "sft": SFT,
        "rewardModel": RewardModel,
        "dpo": DPO,
        "onlineDpo": OnlineDPO,
        "plugin": AlgorithmPlugin,
    }
)
"""Member of `spec.algorithm` -> its fields."""


class Chosen(Protocol):
    """`spec.algorithm`."""

    @property
    def name(self) -> str: ...

    @property
    def fields(self) -> AlgorithmFields: ...


class HasAlgorithm(Protocol):
    """The spec of a job, reduced to the parts about its algorithm."""

    @property
    def algorithm(self) -> Chosen: ...

    def combination(self, role: ModelRole) -> Combination | None: ...

    def scope(self, role: ModelRole, reward: str) -> Scope: ...


def full_graph(algorithm: str) -> Graph:
    """Return the graph of an algorithm with every task that it may have for any values of its fields."""
    return Graph(algorithm, ALGORITHMS[algorithm].all_tasks)


def without(group: Group) -> tuple[str, ...]:
    """Return the names of the algorithms that have no task in a group for any values of their fields."""
    return tuple(name for name in ALGORITHMS if not full_graph(name).tasks_of(group))


def graph_of(spec: HasAlgorithm) -> Graph:
    """Return the graph of a job. A task that judges by named rewards becomes one task for each of them."""
    tasks = (part for task in spec.algorithm.fields.tasks for part in _parts(task, spec))
    return Graph(spec.algorithm.name, tuple(tasks))


def _parts(task: Task, spec: HasAlgorithm) -> Iterator[Task]:
    combination = spec.combination(task.model) if task.rewards else None
    if combination is None:
        yield replace(task, scope=spec.scope(task.model, "")) if task.rewards else task
        return
    (of,) = task.produces
    assert isinstance(of, SampleField)
    for name, _ in combination.weights:
        part, scope = RewardPart(name, of, combination), spec.scope(task.model, name)
        produced = (NamedField(f"{of}/{name}"),)
        yield replace(task, name=f"{task.name}/{name}", produces=produced, part=part, scope=scope)


class HasRollout(HasAlgorithm, Protocol):
    """The spec of a job, reduced to the parts about the size of an iteration."""

    @property
    def rollout(self) -> "Sizes": ...


class Sizes(Protocol):
    """`spec.rollout`."""

    @property
    def batch_size(self) -> int: ...

    @property
    def oversample(self) -> int: ...

    @property
    def max_staleness(self) -> int: ...

    @property
    def long_rounds(self) -> str: ...


def samples_of_batch(spec: HasRollout) -> int:
    """Return the number of samples of a batch: those that are trained on, and their greedy baselines."""
    return spec.rollout.batch_size // spec.algorithm.fields.responses_per_prompt * samples_per_prompt(spec)


def most_samples(spec: HasRollout) -> int:
    """Return an upper bound of the samples with which an iteration begins: with oversampling, without refill."""
    schedule = prompt_schedule(spec)
    most = schedule.most + (most_surplus(schedule.batch) if spec.rollout.long_rounds == "Auto" else 0)
    return most * samples_per_prompt(spec)


def samples_begun(spec: HasRollout, schedules: PromptSchedules, iteration: int) -> int:
    """Return the number of samples with which an iteration begins: its new ones and those that it takes up."""
    return schedules.at(iteration).size(iteration) * samples_per_prompt(spec)


def prompt_schedule(spec: HasRollout) -> PromptSchedule:
    """Return which prompts each iteration begins, takes up and defers.

    With `longRounds: Auto` it is the first schedule of the job, without surplus prompts.
    """
    rollout = spec.rollout
    batch = rollout.batch_size // spec.algorithm.fields.responses_per_prompt
    deferred = rollout.long_rounds != "Disabled"
    surplus: Surplus = "Deferred" if deferred else "Carried" if rollout.max_staleness else "Dropped"
    return PromptSchedule(batch, rollout.oversample, surplus)


def samples_per_prompt(spec: HasAlgorithm) -> int:
    """Return the number of responses per prompt, with the greedy baseline if there is one."""
    return spec.algorithm.fields.responses_per_prompt + has_greedy_baseline(spec)


def same_prompt_samples(spec: HasRollout) -> float:
    """Return the mean number of trained samples of one prompt in a mini-batch, at least 1."""
    fields = spec.algorithm.fields
    return max(1.0, fields.responses_per_prompt * fields.mini_batch_size / spec.rollout.batch_size)


def has_greedy_baseline(spec: HasAlgorithm) -> bool:
    """Return whether the last sample of each prompt is a greedy baseline, which is not trained on."""
    return spec.algorithm.fields.greedy_baseline
