"""Every algorithm by the name of its member in `spec.algorithm`, and the questions asked of a job's.

To add one: a module beside this one, a line here, and the module of the same name in `rlhf_workers.algorithms`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from rlhf_api.algorithms.fields import AlgorithmFields
from rlhf_api.algorithms.graph import Graph
from rlhf_api.algorithms.grpo import GRPO
from rlhf_api.algorithms.plugin import AlgorithmPlugin
from rlhf_api.algorithms.ppo import PPO

ALGORITHMS: Final[Mapping[str, type[AlgorithmFields]]] = MappingProxyType(
    {"ppo": PPO, "grpo": GRPO, "plugin": AlgorithmPlugin}
)
"""Member of `spec.algorithm` -> its fields."""


class Chosen(Protocol):
    """`spec.algorithm`."""

    @property
    def name(self) -> str: ...

    @property
    def fields(self) -> AlgorithmFields: ...


class HasAlgorithm(Protocol):
    """The spec of a job, as far as its algorithm is concerned."""

    @property
    def algorithm(self) -> Chosen: ...


def full_graph(algorithm: str) -> Graph:
    """Return the graph of an algorithm with every task it may have, whatever its numbers are."""
    return Graph(algorithm, ALGORITHMS[algorithm].all_tasks)


def graph_of(spec: HasAlgorithm) -> Graph:
    """Return the graph of a job."""
    return Graph(spec.algorithm.name, spec.algorithm.fields.tasks)


def samples_per_prompt(spec: HasAlgorithm) -> int:
    """Return how many responses are sampled for one prompt."""
    return spec.algorithm.fields.responses_per_prompt
