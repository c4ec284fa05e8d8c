"""Algorithms as dataflow graphs: which models, which tasks, what each task needs and makes.

Coordinator, planner and manifests read the graph; nothing anywhere is written "if ppo". A group of workers exists only
if a task of the graph runs in it. Fields travel with samples under the names a task `produces`.
Must never hold numbers of an algorithm (those are `rlhf_api.job.algorithm`) or code of a loss (`rlhf_workers.losses`).
"""

from dataclasses import dataclass
from typing import Final, Literal

from rlhf_api.job.algorithm import GRPO
from rlhf_api.job.spec import RLHFJobSpec
from rlhf_api.names import Group

Role = Literal["actor", "critic", "reference", "reward"]
Field = Literal["tokens", "log_probabilities", "reference_log_probabilities", "values", "reward"]


@dataclass(frozen=True)
class Task:
    """One node: a model role does something once a sample has every field it needs."""

    name: str
    group: Group
    model: Role
    needs: tuple[Field, ...]
    produces: tuple[Field, ...]


@dataclass(frozen=True)
class Graph:
    """The dataflow of one iteration. Training waits for the whole batch; every other task for its sample alone."""

    algorithm: str
    tasks: tuple[Task, ...]

    def tasks_of(self, group: Group) -> tuple[Task, ...]:
        """Tasks that run in a group, in graph order."""
        return tuple(task for task in self.tasks if task.group == group)

    @property
    def roles(self) -> frozenset[Role]:
        """Model roles that some task of the graph uses."""
        return frozenset(task.model for task in self.tasks)

    @property
    def trained(self) -> tuple[Role, ...]:
        """Model roles with a training task, in training order."""
        return tuple(task.model for task in self.tasks_of(Group.TRAINING))

    @property
    def scored_fields(self) -> tuple[Field, ...]:
        """Fields a sample must have before it may be trained on, beyond what generation produces."""
        return tuple(field for task in self.tasks_of(Group.INFERENCE) for field in task.produces)


_GENERATE: Final = Task("generate", Group.GENERATION, "actor", (), ("tokens", "log_probabilities"))
_REFERENCE: Final = Task("reference", Group.INFERENCE, "reference", ("tokens",), ("reference_log_probabilities",))
_VALUES: Final = Task("values", Group.INFERENCE, "critic", ("tokens",), ("values",))
_REWARD: Final = Task("reward", Group.INFERENCE, "reward", ("tokens",), ("reward",))
_TRAIN_ACTOR: Final = Task("train-actor", Group.TRAINING, "actor", ("log_probabilities", "reward"), ())
_TRAIN_CRITIC: Final = Task("train-critic", Group.TRAINING, "critic", ("values", "reward"), ())

_TASKS: Final[dict[str, tuple[Task, ...]]] = {
    "ppo": (_GENERATE, _REFERENCE, _VALUES, _REWARD, _TRAIN_ACTOR, _TRAIN_CRITIC),
    "grpo": (_GENERATE, _REFERENCE, _REWARD, _TRAIN_ACTOR),
}


ALGORITHMS: Final = tuple(_TASKS)
"""Every algorithm that has a graph; the members of `spec.algorithm`."""


def full_graph(algorithm: str) -> Graph:
    """The graph of an algorithm with every task it may have, whatever its numbers are."""
    return Graph(algorithm, _TASKS[algorithm])


def graph_of(spec: RLHFJobSpec) -> Graph:
    """The graph of a job. Without a KL term nobody needs the reference model, so its task is dropped."""
    tasks = _TASKS[spec.algorithm.name]
    if spec.algorithm.fields.kl_coefficient == 0:
        tasks = tuple(task for task in tasks if task.model != "reference")
    return Graph(spec.algorithm.name, tasks)


def samples_per_prompt(spec: RLHFJobSpec) -> int:
    """Responses sampled for one prompt (GRPO's group size; else 1)."""
    fields = spec.algorithm.fields
    return fields.group_size if isinstance(fields, GRPO) else 1
