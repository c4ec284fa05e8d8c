"""Dataflow graphs: fields of samples with their shapes, tasks that need and produce them, and the usual tasks.

A group of workers exists only if a task of the graph runs in it. Fields travel with samples under the names that a task
`produces`. Pure data: must never hold numbers of an algorithm or code of a loss.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cached_property
from typing import Final

from rlhf_api.algorithms.combination import Combination
from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_common.names import Group


class Shape(Enum):
    """How many numbers a field has."""

    PER_TOKEN = auto()
    """One per token of the response."""
    PER_SAMPLE = auto()
    """One per response."""
    PER_GROUP = auto()
    """One per prompt, shared by the responses to it."""


class Scope(Enum):
    """What a task waits for before it starts."""

    SAMPLE = auto()
    """Its sample alone."""
    GROUP = auto()
    """Every response to the prompt."""
    BATCH = auto()
    """Every sample of the iteration."""


class SampleField(StrEnum):
    """A field of a sample. Members are strings, the names that the wire uses."""

    TOKENS = "tokens"
    """Sampled token ids."""
    LOG_PROBABILITIES = "log_probabilities"
    """Of the tokens, by the policy that sampled them."""
    REFERENCE_LOG_PROBABILITIES = "reference_log_probabilities"
    """Of the tokens, by the reference."""
    VALUES = "values"
    """Of the states before the tokens, by the critic."""
    REWARD = "reward"
    """What the response is worth."""
    COST_VALUES = "cost_values"
    """Costs to come from the states before the tokens, by the critic of costs."""
    COST = "cost"
    """What harm the response does."""

    @property
    def shape(self) -> Shape:
        """How many numbers a sample has of it."""
        return _SHAPES[self]

    def numbers(self, response_tokens: int) -> int:
        """Return how many numbers a sample has of this field when its response has so many tokens."""
        return response_tokens if self.shape is Shape.PER_TOKEN else 1


_SHAPES: Final = {
    SampleField.TOKENS: Shape.PER_TOKEN,
    SampleField.LOG_PROBABILITIES: Shape.PER_TOKEN,
    SampleField.REFERENCE_LOG_PROBABILITIES: Shape.PER_TOKEN,
    SampleField.VALUES: Shape.PER_TOKEN,
    SampleField.REWARD: Shape.PER_SAMPLE,
    SampleField.COST_VALUES: Shape.PER_TOKEN,
    SampleField.COST: Shape.PER_SAMPLE,
}


class NamedField(str):
    """What one of several rewards says of a response, such as `reward/correct`: a number that may be missing."""

    @property
    def shape(self) -> Shape:
        """How many numbers a sample has of it."""
        return Shape.PER_SAMPLE

    def numbers(self, response_tokens: int) -> int:
        """Return how many numbers a sample has of this field, whatever its response has."""
        return 1


@dataclass(frozen=True)
class RewardPart:
    """That a task gives one of several rewards of a role."""

    name: str
    of: SampleField
    """The field that it becomes with the others."""
    combination: Combination
    """How it does; the same for all parts of the field."""


@dataclass(frozen=True)
class Task:
    """One node: a model role does something once everything in its scope has every field that it needs."""

    name: str
    group: Group
    model: ModelRole
    needs: tuple[SampleField, ...]
    produces: tuple[SampleField | NamedField, ...]
    scope: Scope = Scope.SAMPLE
    part: RewardPart | None = None
    """Set where it gives one of several rewards: then it alone produces no field that is trained on."""

    @property
    def rewards(self) -> bool:
        """Whether the task judges responses: it alone may abstain, and user code may stand behind it."""
        return self.model.kind is ModelKind.REWARD and self.group is not Group.TRAINING

    @property
    def incremental(self) -> bool:
        """Whether an unfinished response can be scored block by block: every number belongs to one token."""
        return bool(self.produces) and all(field.shape is Shape.PER_TOKEN for field in self.produces)


@dataclass(frozen=True)
class Graph:
    """The dataflow of one iteration."""

    algorithm: str
    tasks: tuple[Task, ...]

    def tasks_of(self, group: Group) -> tuple[Task, ...]:
        """Return the tasks that run in a group, in graph order."""
        return tuple(task for task in self.tasks if task.group == group)

    @property
    def generates(self) -> bool:
        """Whether responses are sampled; without a task that does, every line of the prompt file holds its own."""
        return bool(self.tasks_of(Group.GENERATION))

    @property
    def policy(self) -> ModelRole:
        """The model role that generates; where none does, the one that is trained first."""
        generating = self.tasks_of(Group.GENERATION) or self.tasks_of(Group.TRAINING)
        return generating[0].model

    @property
    def roles(self) -> frozenset[ModelRole]:
        """Model roles that some task of the graph uses."""
        return frozenset(task.model for task in self.tasks)

    @property
    def trained(self) -> tuple[ModelRole, ...]:
        """Model roles with a training task, in training order."""
        return tuple(task.model for task in self.tasks_of(Group.TRAINING))

    @property
    def scored_fields(self) -> tuple[SampleField, ...]:
        """Fields a sample must have before it may be trained on, beyond what generation produces."""
        tasks = self.tasks_of(Group.INFERENCE)
        return tuple(dict.fromkeys(field for task in tasks for field in _combined(task)))

    @property
    def batch_fields(self) -> tuple[SampleField, ...]:
        """Fields of a sample that training gets beside its tokens."""
        return (*((SAMPLED_FIELD,) if self.generates else ()), *self.scored_fields)

    @cached_property
    def reward_fields(self) -> tuple[SampleField, ...]:
        """Fields that say what a response is worth; the first is the one that is shown to people."""
        return tuple(dict.fromkeys(field for task in self.tasks if task.rewards for field in _combined(task)))

    @cached_property
    def reward_parts(self) -> dict[str, str]:
        """Name of one of several rewards -> field that it gives."""
        return {task.part.name: str(task.produces[0]) for task in self.tasks if task.part}

    @cached_property
    def combination(self) -> Combination | None:
        """How several rewards of a response become the first of `reward_fields`; None where there is one."""
        return next((task.part.combination for task in self.tasks if task.part), None)

    @cached_property
    def compared_fields(self) -> tuple[SampleField, ...]:
        """Log-probabilities by another policy than the one that sampled: what the divergence is measured to."""
        return tuple(
            field
            for task in self.tasks_of(Group.INFERENCE)
            if task.model.kind is ModelKind.POLICY
            for field in _combined(task)
        )


def _combined(task: Task) -> tuple[SampleField, ...]:
    """What a sample has of a task in the end."""
    return (task.part.of,) if task.part else tuple(map(SampleField, task.produces))


SAMPLED_FIELD: Final = SampleField.LOG_PROBABILITIES
"""What generation gives with the tokens: the one field that a sample has before it is scored."""
GENERATE: Final = Task("generate", Group.GENERATION, ModelRole.ACTOR, (), (SampleField.TOKENS, SAMPLED_FIELD))
SCORE_REFERENCE: Final = Task(
    "reference",
    Group.INFERENCE,
    ModelRole.REFERENCE,
    (SampleField.TOKENS,),
    (SampleField.REFERENCE_LOG_PROBABILITIES,),
)
SCORE_VALUES: Final = Task("values", Group.INFERENCE, ModelRole.CRITIC, (SampleField.TOKENS,), (SampleField.VALUES,))
SCORE_REWARD: Final = Task("reward", Group.INFERENCE, ModelRole.REWARD, (SampleField.TOKENS,), (SampleField.REWARD,))
SCORE_COST_VALUES: Final = Task(
    "cost-values", Group.INFERENCE, ModelRole.COST_CRITIC, (SampleField.TOKENS,), (SampleField.COST_VALUES,)
)
SCORE_COST: Final = Task("cost", Group.INFERENCE, ModelRole.COST, (SampleField.TOKENS,), (SampleField.COST,))
TRAIN_ACTOR: Final = Task(
    "train-actor",
    Group.TRAINING,
    ModelRole.ACTOR,
    (SampleField.LOG_PROBABILITIES, SampleField.REWARD),
    (),
    Scope.BATCH,
)
TRAIN_ON_RESPONSES: Final = Task("train-actor", Group.TRAINING, ModelRole.ACTOR, (SampleField.TOKENS,), (), Scope.BATCH)
"""Of responses that were there before: nothing is known of whoever wrote them."""
TRAIN_REWARD: Final = Task("train-reward", Group.TRAINING, ModelRole.REWARD, (SampleField.TOKENS,), (), Scope.BATCH)
TRAIN_CRITIC: Final = Task(
    "train-critic", Group.TRAINING, ModelRole.CRITIC, (SampleField.VALUES, SampleField.REWARD), (), Scope.BATCH
)
TRAIN_COST_CRITIC: Final = Task(
    "train-cost-critic",
    Group.TRAINING,
    ModelRole.COST_CRITIC,
    (SampleField.COST_VALUES, SampleField.COST),
    (),
    Scope.BATCH,
)
