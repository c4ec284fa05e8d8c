"""Memory of a plan's devices by phase, with activations where the shape of a model is known.

Activations count as divided by the tensor and context ranks, workspace does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_planner.device_memory import Estimate, decoding_and_scoring, scoring, training
from rlhf_planner.plan_search.device_plan import DevicePlan
from rlhf_planner.plan_search.training_seconds import TrainingSettings
from rlhf_planner.plan_search.workload import Workload
from rlhf_planner.training_memory import RUNTIME_BYTES, StageTraining, training_memory

Phase = Literal["generation", "inference", "training"]
ACTIVATIONS: Final = ("activations", "logits", "working memory", "workspace")
"""Parts of `training_memory` that `device_memory` does not count."""


def phase_memory(workload: Workload, plan: DevicePlan) -> Mapping[Phase, Estimate]:
    """Return the memory of one device in each phase. Groups of colocated roles share a device, phase by phase."""
    spec = plan.applied(workload.spec)
    settings = TrainingSettings(plan.parallelism, plan.micro_batch_size, plan.activation_checkpointing)
    phases: dict[Phase, Estimate] = {"generation": generation_memory(workload, plan)}
    if plan.inference_workers:
        phases["inference"] = scoring(spec, workload.sizes)
    base = training(spec, workload.sizes)
    return phases | {"training": with_activations(workload, base, settings)}


def generation_memory(workload: Workload, plan: DevicePlan) -> Estimate:
    """Return the memory of a device of a generation worker.

    It includes the scoring models without inference workers, or where a worker that fusion releases may load them.
    """
    return decoding_and_scoring(plan.applied(workload.spec), workload.sizes)


def with_activations(workload: Workload, base: Estimate, settings: TrainingSettings) -> Estimate:
    """Return the memory of a training rank with the activations of the model that needs the most, and on a GPU its
    runtime."""
    parts, unknown = dict(base.parts), [*base.unknown]
    largest: dict[str, int] = {}
    for role in workload.trained:
        if role not in workload.shapes:
            unknown.append(f"activations of {role}")
            continue
        counted = _activations(workload, settings, role)
        largest = max(largest, counted, key=lambda found: sum(found.values()))
    runtime = {"runtime": RUNTIME_BYTES} if workload.on_gpus else {}
    return Estimate(parts | largest | runtime, tuple(unknown), base.host)


def _activations(workload: Workload, settings: TrainingSettings, role: ModelRole) -> dict[str, int]:
    """Return the bytes of ACTIVATIONS on a model's first or last stage, the one that needs more."""
    spec, parallelism = workload.spec, settings.parallelism
    stages, ranks = parallelism.stages_of(role), parallelism.tensor_of(role) * parallelism.context
    copies = parallelism.data * settings.micro_batch_size
    waiting = max(1, spec.algorithm.fields.mini_batch_size // copies)
    tokens = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    limit = spec.training.micro_batch_tokens
    samples = settings.micro_batch_size if limit is None else max(1, min(settings.micro_batch_size, limit // tokens))
    found: dict[str, int] = {}
    for stage in {0, stages - 1}:
        counted = training_memory(
            StageTraining(
                workload.shapes[role], stages, stage, "value" if role.kind is ModelKind.VALUE else "lm", samples,
                tokens, spec.rollout.max_response_tokens, min(waiting, stages - stage),
                half=spec.compute_type == "BFloat16", recompute=settings.activation_checkpointing,
                written_out=spec.deterministic, on_gpu=workload.on_gpus,
            )
        )  # fmt: skip
        divided = {name: max(0, counted[name]) // (1 if name == "workspace" else ranks) for name in ACTIVATIONS}
        found = max(found, divided, key=lambda parts: sum(parts.values()))
    return found
