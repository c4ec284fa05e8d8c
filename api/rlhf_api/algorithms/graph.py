"""Dataflow graphs: fields of samples with their shapes, tasks that need and produce them, and the usual tasks.

Pure data: must never contain an algorithm's values or code of a loss.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cached_property
from typing import Final

from rlhf_api.algorithms.combination import Combination
from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_common.names import Group


class Shape(Enum):
    """Number of values in a field."""

    PER_TOKEN = auto()
    """One per token of the response."""
    PER_SAMPLE = auto()
    """One per response."""


class Scope(Enum):
    """Samples that must be ready before a task starts."""

    SAMPLE = auto()
    """Only its own sample."""
    GROUP = auto()
    """Every response to the prompt."""
    BATCH = auto()
    """Every sample of the batch."""


class SampleField(StrEnum):
    """A field of a sample. Members are strings, the names in messages."""

    TOKENS = "tokens"
    """Token ids of the response."""
    LOG_PROBABILITIES = "log_probabilities"
    """Log-probabilities of the tokens, from the policy that sampled them."""
    REFERENCE_LOG_PROBABILITIES = "reference_log_probabilities"
    """Log-probabilities of the tokens, from the reference."""
    VALUES = "values"
    """Values of the states before the tokens, from the critic."""
    REWARD = "reward"
    """Reward of the response."""
    COST_VALUES = "cost_values"
    """Expected costs from the states before the tokens, from the critic of costs."""
    COST = "cost"
    """Cost of the response: the harm that it does."""

    @property
    def shape(self) -> Shape:
        """Number of values per sample."""
        return _SHAPES[self]

    def numbers(self, response_tokens: int) -> int:
        """Return the number of values of this field for a response of `response_tokens` tokens."""
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
    """The field of a named reward, such as `reward/correct`; a sample may lack its value."""

    @property
    def shape(self) -> Shape:
        """Number of values per sample."""
        return Shape.PER_SAMPLE

    def numbers(self, response_tokens: int) -> int:
        """Return the number of values of this field, always 1."""
        return 1


@dataclass(frozen=True)
class RewardPart:
    """Marks a task that produces a named reward of a role."""

    name: str
    of: SampleField
    """The field that combines all named rewards of the role."""
    combination: Combination
    """The combination, the same for all parts of the field."""


@dataclass(frozen=True)
class Task:
    """One node: a model role processes samples that have the needed fields."""

    name: str
    group: Group
    model: ModelRole
    needs: tuple[SampleField, ...]
    produces: tuple[SampleField | NamedField, ...]
    scope: Scope = Scope.SAMPLE
    part: RewardPart | None = None
    """Set if the task produces a named reward, which the batch fields contain only in combination."""

    @property
    def rewards(self) -> bool:
        """Whether the task judges responses. Such a task may abstain, and may call user code."""
        return self.model.kind is ModelKind.REWARD and self.group is not Group.TRAINING

    @property
    def incremental(self) -> bool:
        """Whether each value that the task produces belongs to one token, so that unfinished responses can be scored by
        blocks. False if it produces nothing."""
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
        """Whether responses are sampled. Otherwise every line of the prompt file contains its own."""
        return bool(self.tasks_of(Group.GENERATION))

    @property
    def policy(self) -> ModelRole:
        """The model role that generates; without generation, the one that is trained first."""
        generating = self.tasks_of(Group.GENERATION) or self.tasks_of(Group.TRAINING)
        return generating[0].model

    @property
    def roles(self) -> frozenset[ModelRole]:
        """Model roles that the tasks use."""
        return frozenset(task.model for task in self.tasks)

    @property
    def trained(self) -> tuple[ModelRole, ...]:
        """Model roles with a training task, in graph order."""
        return tuple(task.model for task in self.tasks_of(Group.TRAINING))

    @property
    def scored_fields(self) -> tuple[SampleField, ...]:
        """Fields that scoring adds to a sample before training."""
        tasks = self.tasks_of(Group.INFERENCE)
        return tuple(dict.fromkeys(field for task in tasks for field in _combined(task)))

    @property
    def batch_fields(self) -> tuple[SampleField, ...]:
        """Fields of a sample that training receives besides its tokens."""
        return (*((SAMPLED_FIELD,) if self.generates else ()), *self.scored_fields)

    @cached_property
    def reward_fields(self) -> tuple[SampleField, ...]:
        """Fields with rewards or costs of a response; metrics call the first `reward`."""
        return tuple(dict.fromkeys(field for task in self.tasks if task.rewards for field in _combined(task)))

    @cached_property
    def reward_parts(self) -> dict[str, str]:
        """Name of a named reward -> the field that it produces."""
        return {task.part.name: str(task.produces[0]) for task in self.tasks if task.part}

    @cached_property
    def combination(self) -> Combination | None:
        """Combination of named rewards into the first of `reward_fields`; None without named rewards."""
        return next((task.part.combination for task in self.tasks if task.part), None)

    @cached_property
    def compared_fields(self) -> tuple[SampleField, ...]:
        """Log-probability fields of scoring tasks, such as the reference's, with which the policy is compared."""
        return tuple(
            field
            for task in self.tasks_of(Group.INFERENCE)
            if task.model.kind is ModelKind.POLICY
            for field in _combined(task)
        )


def _combined(task: Task) -> tuple[SampleField, ...]:
    """Return the fields that a task finally contributes to a sample."""
    return (task.part.of,) if task.part else tuple(map(SampleField, task.produces))


SAMPLED_FIELD: Final = SampleField.LOG_PROBABILITIES
"""Field that generation returns with the tokens, before any scoring."""
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
"""Training on existing responses, whose origin is unknown."""
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
