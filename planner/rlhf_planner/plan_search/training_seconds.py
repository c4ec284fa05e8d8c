"""Seconds of training one iteration in a layout, by model and by purpose.

A mini-batch is serial 1F1B: all stages of one micro-batch once, then the slowest stage for each further micro-batch.
Models train one after another. Fused schedules are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.job.groups import TrainingParallelism
from rlhf_planner.device_memory import FLOAT32_BYTES, OPTIMIZER_BYTES
from rlhf_planner.plan_search.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    transfer_seconds,
)
from rlhf_planner.plan_search.cost_figures import NOTHING, FigureSource, LinkCosts, PlanCosts, weakest
from rlhf_planner.plan_search.training_compute import ends_seconds, layer_seconds
from rlhf_planner.plan_search.workload import MicroBatchSize, ModelFacts, Workload
from rlhf_planner.transformer_shape import stage_layers

STEP_BYTES: Final = 28
"""Bytes per parameter that AdamW reads (weight, gradient, two moments) and writes (weight, two moments)."""
LAYER_TENSORS: Final = 9
"""Assumed parameter tensors of a layer, each sent on its own after a step whose moments are shared: 7 matrices and 2
norms."""
TENSOR_SUMS: Final = 4
"""Sums per layer in a tensor group: two forward, two backward. Recomputation repeats the forward ones."""
EXPERT_EXCHANGES: Final = 5
"""Exchanges per layer in an expert group, of the chosen tokens' states."""
SHARD_GATHERS: Final = 3
"""Gathers, or scatters of sums, per layer and micro-batch of a sharded model."""

AFTER_SCHEDULE: Final = ("gradient sums", "gathered weights", "optimizer", "moments from the host")
"""Purposes whose seconds follow the schedule of a mini-batch."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a plan that training time depends on."""

    parallelism: TrainingParallelism
    micro_batch_size: int
    activation_checkpointing: bool = False
    devices_per_rank: int = 1

    def span(self, ranks: int) -> int:
        """Return the devices that so many consecutive ranks span."""
        return ranks * self.devices_per_rank


@dataclass(frozen=True)
class TrainingTimes:
    """Seconds of one iteration's training."""

    models: Mapping[str, Mapping[str, float]]
    """Role -> purpose -> seconds."""
    source: FigureSource
    rest: float = 0.0
    """Seconds of the iteration's training that belong to no mini-batch."""

    @property
    def total(self) -> float:
        """Seconds of all models, one after the other, and the rest."""
        return self.rest + sum(self.of_model(role) for role in self.models)

    @property
    def after_schedules(self) -> float:
        """Seconds of all models after the schedules of their mini-batches."""
        return sum(parts.get(name, 0.0) for parts in self.models.values() for name in AFTER_SCHEDULE)

    def of_model(self, role: str) -> float:
        """Return the seconds of one model."""
        return sum(self.models[role].values())

    @property
    def bound(self) -> str:
        """Purpose that takes the most seconds."""
        purposes: dict[str, float] = {}
        for parts in self.models.values():
            for name, seconds in parts.items():
                purposes[name] = purposes.get(name, 0.0) + seconds
        return max(purposes, key=lambda name: purposes[name])


def training_times(workload: Workload, costs: PlanCosts, settings: TrainingSettings) -> TrainingTimes:
    """Return the seconds of one iteration's training in a layout that the job may have."""
    fields, count = workload.spec.algorithm.fields, _samples(workload, settings)
    copies = settings.parallelism.data
    micro_batches = max(1, -(-fields.mini_batch_size // (count * copies)))
    mini_batches = mini_batches_of(workload)
    batch = workload.micro_batch(count)
    models, sources = {}, [workload.length_source]
    for role in workload.trained:
        parts, source = _mini_batch(workload, costs, settings, role, batch, micro_batches)
        models[str(role)] = {name: seconds * mini_batches for name, seconds in parts.items()}
        sources.append(source)
    rest = costs.iteration_seconds
    sources += [rest.source] if rest is not None else []
    return TrainingTimes(models, weakest(sources), 0.0 if rest is None else rest.value)


def mini_batches_of(workload: Workload) -> int:
    """Return the mini-batches of an iteration."""
    fields = workload.spec.algorithm.fields
    return max(1, workload.samples // fields.mini_batch_size) * fields.epochs


def _samples(workload: Workload, settings: TrainingSettings) -> int:
    """Return the samples of a micro-batch: microBatchSize, or fewer where microBatchTokens bounds them."""
    limit = workload.spec.training.micro_batch_tokens
    if limit is None:
        return settings.micro_batch_size
    batch = workload.micro_batch(settings.micro_batch_size)
    return max(1, min(settings.micro_batch_size, int(limit * settings.micro_batch_size // batch.tokens)))


def _mini_batch(
    workload: Workload,
    costs: PlanCosts,
    settings: TrainingSettings,
    role: ModelRole,
    batch: MicroBatchSize,
    micro_batches: int,
) -> tuple[dict[str, float], FigureSource]:
    """Return the seconds of a mini-batch of one model by purpose, and their source."""
    parallelism, model = settings.parallelism, workload.model(role)
    tensor, stages, lora = (
        parallelism.tensor_of(role),
        parallelism.stages_of(role),
        workload.spec.training.adapters(role),
    )
    layer = layer_seconds(
        model, batch, costs, tensor=tensor, context=parallelism.context, recompute=settings.activation_checkpointing,
        adapters=lora is not None, value_bytes=workload.value_bytes,
    )  # fmt: skip
    by_layer, links = _layer_communication(workload, costs, settings, model, role, batch)
    embedding, head = ends_seconds(
        model, batch, costs, policy=role == workload.policy.role, tensor=tensor, context=parallelism.context
    )
    edge_link = costs.link(settings.span(stages * tensor))
    states = batch.tokens / parallelism.context * model.hidden * workload.value_bytes
    edge = 2 * transfer_seconds(states, edge_link) if stages > 1 else 0.0
    rows = [len(stage_layers(model.layers, stages, stage)) for stage in range(stages)]
    communicated = sum(by_layer.values())
    constant, start = costs.stage_seconds or NOTHING, costs.start_seconds or NOTHING
    computed = [count * layer.value + constant.value for count in rows]
    computed[0] += embedding.value
    computed[-1] += head.value
    whole = [own + count * communicated + edge for own, count in zip(computed, rows, strict=True)]
    slowest = max(range(stages), key=lambda stage: (whole[stage], -stage))
    fill = sum(whole) - whole[slowest]
    parts = {"layers": micro_batches * computed[slowest], "pipeline bubbles": fill}
    parts |= {"stage transfers": micro_batches * edge, "first micro-batch": stages * start.value}
    parts |= {name: micro_batches * rows[slowest] * seconds for name, seconds in by_layer.items()}
    parts |= _end_of_mini_batch(workload, costs, settings, model, role)
    sources = [figure.source for figure in (layer, embedding, head, constant, start)]
    sources.append(costs.compute_source if costs.optimizer_seconds is None else costs.optimizer_seconds.source)
    sources += [link.source for link in links]
    sources += [edge_link.source] if stages > 1 else []
    sources += [costs.link(settings.span(parallelism.ranks)).source] if "gradient sums" in parts else []
    return {name: seconds for name, seconds in parts.items() if seconds > 0}, weakest(sources)


def _layer_communication(
    workload: Workload,
    costs: PlanCosts,
    settings: TrainingSettings,
    model: ModelFacts,
    role: ModelRole,
    batch: MicroBatchSize,
) -> tuple[dict[str, float], list[LinkCosts]]:
    """Return the seconds of communication for one layer of a micro-batch by purpose, and the links that are used."""
    parallelism, width = settings.parallelism, workload.value_bytes
    tensor, block = parallelism.tensor_of(role), parallelism.pipeline * parallelism.tensor
    tokens = batch.tokens / parallelism.context
    states = tokens * model.hidden * width
    parts: dict[str, float] = {}
    links: list[LinkCosts] = []
    if tensor > 1:
        links.append(costs.link(settings.span(tensor)))
        sums = TENSOR_SUMS + (TENSOR_SUMS // 2 if settings.activation_checkpointing else 0)
        parts["tensor sums"] = sums * all_reduce_seconds(states, tensor, links[-1])
    if parallelism.context > 1:
        links.append(costs.link(settings.span(block * parallelism.context)))
        keys = batch.tokens * model.size.cache_values_per_token / model.layers
        forward = all_gather_seconds(keys * width, parallelism.context, links[-1])
        parts["context gathers"] = forward + all_gather_seconds(keys * FLOAT32_BYTES, parallelism.context, links[-1])
    if parallelism.expert > 1:
        links.append(costs.link(settings.span(block * parallelism.expert)))
        sent = states * max(1, model.chosen_experts)
        parts["expert exchanges"] = EXPERT_EXCHANGES * all_to_all_seconds(sent, parallelism.expert, links[-1])
    if parallelism.shard > 1:
        links.append(costs.link(settings.span(parallelism.ranks)))
        gathered = model.layer_parameters * width
        parts["gathered parts"] = SHARD_GATHERS * all_gather_seconds(gathered, parallelism.shard, links[-1])
    return parts, links


def _end_of_mini_batch(
    workload: Workload, costs: PlanCosts, settings: TrainingSettings, model: ModelFacts, role: ModelRole
) -> dict[str, float]:
    """Return the seconds after the schedule of a mini-batch, by purpose of AFTER_SCHEDULE."""
    parallelism, lora = settings.parallelism, workload.spec.training.adapters(role)
    trained = model.size.parameters if lora is None else model.size.adapter_parameters(lora) or model.size.parameters
    copies = parallelism.data * parallelism.context
    link = costs.link(settings.span(parallelism.ranks))
    stage = trained / (parallelism.pipeline * parallelism.tensor)
    own = trained / parallelism.keepers
    parts: dict[str, float] = {}
    if copies > 1 and parallelism.shard == 1:
        summed = own if parallelism.expert > 1 else stage
        parts["gradient sums"] = all_reduce_seconds(summed * FLOAT32_BYTES, copies, link)
    stepped = trained / parallelism.writers
    if parallelism.shard_optimizer:
        tensors = math.ceil(model.layers / parallelism.stages_of(role)) * LAYER_TENSORS
        latency = tensors * math.log2(copies) * link.latency.value
        parts["gathered weights"] = all_gather_seconds(stage * FLOAT32_BYTES, copies, link) + latency
    if costs.optimizer_seconds is not None:
        parts["optimizer"] = stepped * costs.optimizer_seconds.value
    else:
        parts["optimizer"] = stepped * STEP_BYTES / costs.memory_bandwidth.value * costs.compute.value
    if parallelism.offload_optimizer:
        parts["moments from the host"] = 2 * stepped * OPTIMIZER_BYTES / costs.host_bandwidth.value
    return parts
