"""The algorithms as the contract sees them: one module for each, and the registry that finds them by name.

A module holds the fields of its manifest, its dataflow graph, how many responses it samples per prompt, and the rules
that only it has. Its mathematics is the module of the same name in `rlhf_workers.algorithms`. Coordinator, planner,
operator and command line ask the graph of a job (`graph_of`): which roles are trained, which task produces which field,
of which shape. They know no algorithm, and no role or field by its name; a test holds them to it.
Must never import torch, or anything of `rlhf_api.job`, which is built from these modules.
"""

from rlhf_api.algorithms.graph import Graph, SampleField, Scope, Shape, Task
from rlhf_api.algorithms.registry import (
    ALGORITHMS,
    full_graph,
    graph_of,
    has_greedy_baseline,
    prompts_apart,
    prompts_begun,
    samples_begun,
    samples_of_batch,
    samples_per_prompt,
    without,
)
from rlhf_api.algorithms.roles import ModelKind, ModelRole

__all__ = [
    "ALGORITHMS",
    "Graph",
    "ModelKind",
    "ModelRole",
    "SampleField",
    "Scope",
    "Shape",
    "Task",
    "full_graph",
    "graph_of",
    "has_greedy_baseline",
    "prompts_apart",
    "prompts_begun",
    "samples_begun",
    "samples_of_batch",
    "samples_per_prompt",
    "without",
]
