"""The manifest side of every algorithm: one module per algorithm, and the registry that finds them by name.

Must never import torch, nor `rlhf_api.job`, which is built from these modules.
"""

from rlhf_api.algorithms.graph import Graph, SampleField, Scope, Shape, Task
from rlhf_api.algorithms.registry import (
    ALGORITHMS,
    full_graph,
    graph_of,
    has_greedy_baseline,
    most_samples,
    prompt_schedule,
    same_prompt_samples,
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
    "most_samples",
    "prompt_schedule",
    "same_prompt_samples",
    "samples_begun",
    "samples_of_batch",
    "samples_per_prompt",
    "without",
]
