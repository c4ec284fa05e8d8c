"""Rules of the number of pods and of the context length, which several fields determine."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.problems import Problem, Severity
from rlhf_api.rank_pods import rank_pods
from rlhf_common.names import Group

MAX_PODS: Final = 5000
"""Maximum pods of a job; Kubernetes supports 5,000 nodes per cluster."""
MAX_CONTEXT: Final = 1_048_576
"""Tokens of prompt and response above which a job gets a warning."""


def size_problems(spec: RLHFJobSpec) -> Iterator[Problem]:
    """Yield a problem for too many pods, and a warning for a context above MAX_CONTEXT."""
    counts = {Group.GENERATION: spec.generation.replicas, Group.INFERENCE: spec.inference.replicas}
    if spec.rank_group is Group.TRAINING:
        counts[Group.TRAINING] = rank_pods(spec)
    graph = graph_of(spec)
    counts = {group: count for group, count in counts.items() if graph.tasks_of(group)}
    pods = 1 + sum(counts.values())
    if pods > MAX_PODS:
        largest = max(counts, key=lambda group: counts[group])
        field = "spec.training.parallelism" if largest is Group.TRAINING else f"spec.{largest}.replicas"
        listed = ", ".join(f"{count} of {group}" for group, count in counts.items())
        message = (
            f"the job has {pods} pods ({listed}, and the coordinator): must be at most {MAX_PODS}, as many as the "
            "largest Kubernetes cluster has nodes: use fewer replicas or ranks, or more ranksPerPod"
        )
        yield Problem(field, counts[largest], message)
    context = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    if context > MAX_CONTEXT:
        longer = "Response" if spec.rollout.max_response_tokens >= spec.rollout.max_prompt_tokens else "Prompt"
        message = (
            f"prompt and response have up to {context} tokens together, more than the {MAX_CONTEXT} of the longest "
            "contexts that models are trained for: lower it to the model's context"
        )
        value = max(spec.rollout.max_prompt_tokens, spec.rollout.max_response_tokens)
        yield Problem(f"spec.rollout.max{longer}Tokens", value, message, severity=Severity.WARNING)
