"""Lists ways to divide the trained models over training ranks, with the memory and the utilization of a rank.

Utilization is that of serial 1F1B with equal stages: with m micro-batches per copy, p stages are busy for m / (m + p -
1) of a mini-batch. Transfers are not counted. Rule: pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import TrainingParallelism
from rlhf_planner.device_memory import Estimate, Sizes, gib, training

MAX_GROWTH: Final = 64
"""Largest factor of a job's ranks up to which a fitting layout is searched."""
MAX_TENSOR: Final = 64
MAX_PIPELINE: Final = 256
"""Largest number of stages that validation accepts."""
FIELD: Final = "spec.training.parallelism"


@dataclass(frozen=True)
class TrainingLayout:
    """A layout with its memory and utilization."""

    parallelism: TrainingParallelism
    memory: Estimate
    """Memory of a rank."""
    busy: float
    """Share of a mini-batch in which a rank computes, 0..1."""

    @property
    def seconds_by_rank(self) -> float:
        """Time of a mini-batch, relative to that of a single rank."""
        return 1.0 / (self.parallelism.ranks * self.busy)

    @property
    def words(self) -> str:
        """Fields that differ from those of one rank, such as `pipeline 4, data 2`."""
        return layout_words(self.parallelism)

    def fits(self, device_bytes: int) -> bool:
        """Return whether the memory is known and fits a device of this size."""
        return not self.memory.unknown and self.memory.total <= device_bytes


def layout_words(parallelism: TrainingParallelism) -> str:
    """Return the fields of a layout that differ from those of one rank, such as `pipeline 4, data 2`."""
    fields = ("pipeline", "data", "context", "tensor", "shard", "expert")
    named = [f"{name} {value}" for name in fields if (value := getattr(parallelism, name)) > 1]
    critic = parallelism.critic_tensor
    named += [f"criticTensor {critic}"] if critic not in (None, parallelism.tensor) else []
    named += ["shardOptimizer"] if parallelism.shard_optimizer else []
    named += ["offloadOptimizer"] if parallelism.offload_optimizer else []
    return ", ".join(named) or "one rank"


def layout_of(spec: RLHFJobSpec, sizes: Sizes) -> TrainingLayout:
    """Return the layout in a job's spec."""
    return _layout(spec, sizes, spec.training.parallelism)


def layouts(spec: RLHFJobSpec, sizes: Sizes, ranks: int) -> list[TrainingLayout]:
    """Return the layouts of so many ranks that the job may have, the highest utilization first, then the least memory.

    Layouts with moments in host memory follow, in the same order.
    """
    found = [_layout(spec, sizes, parallelism) for parallelism in _possible(spec, sizes, ranks)]
    found.sort(key=lambda layout: (-layout.busy, layout.memory.total))
    return found + [_layout(spec, sizes, _offloaded(layout.parallelism)) for layout in found]


def first_that_fits(
    spec: RLHFJobSpec, sizes: Sizes, device_bytes: int, *, offload: bool = False
) -> TrainingLayout | None:
    """Return the fastest layout of the fewest ranks that fits devices of this size; None if none fits.

    The ranks are the job's, then twice as many, up to MAX_GROWTH times.
    """
    ranks = spec.training.ranks
    while ranks <= spec.training.ranks * MAX_GROWTH:
        possible = [layout for layout in layouts(spec, sizes, ranks) if layout.parallelism.offload_optimizer is offload]
        fitting = [layout for layout in possible if layout.fits(device_bytes)]
        if fitting:
            return fitting[0]
        ranks *= 2
    return None


def layout_problem(spec: RLHFJobSpec, sizes: Sizes, device_bytes: int) -> str:
    """Return why a job's training rank does not fit devices of this size, and which layouts do, if any is known; empty
    if it may fit.
    """
    asked = layout_of(spec, sizes)
    if asked.memory.total <= device_bytes:
        return ""
    needs = (
        f"a training rank needs {gib(asked.memory.total)} ({asked.memory.words}), and a device has {gib(device_bytes)}"
    )
    found = [first_that_fits(spec, sizes, device_bytes, offload=offload) for offload in (False, True)]
    better = [layout for layout in found if layout is not None]
    if not better:
        most = MAX_GROWTH * spec.training.ranks
        return f"{needs}: no layout of up to {most} ranks is known to fit; use smaller models or spec.training.lora"
    if len(better) > 1 and better[1].parallelism.ranks >= better[0].parallelism.ranks:
        del better[1]  # its transfers are slower, and it saves no device
    return f"{needs}: use {FIELD}: {' or '.join(map(_advice, better))}"


def _advice(layout: TrainingLayout) -> str:
    ranks = layout.parallelism.ranks
    each = f"{gib(layout.memory.total)} each" if ranks > 1 else gib(layout.memory.total)
    host = sum(layout.memory.host.values())
    beside = f", and {gib(host)} of host memory" if host else ""
    return f"{layout.words} ({ranks} rank{'s' * (ranks > 1)} that need{'s' * (ranks == 1)} {each}{beside})"


def _offloaded(parallelism: TrainingParallelism) -> TrainingParallelism:
    return parallelism.model_copy(update={"offload_optimizer": True})


def _layout(spec: RLHFJobSpec, sizes: Sizes, parallelism: TrainingParallelism) -> TrainingLayout:
    fields = spec.training.model_copy(update={"parallelism": parallelism})
    memory = training(spec.model_copy(update={"training": fields}), sizes)
    microbatches = max(1, spec.algorithm.fields.mini_batch_size // (spec.training.micro_batch_size * parallelism.data))
    return TrainingLayout(parallelism, memory, _busy(spec, sizes, parallelism, microbatches))


def _busy(spec: RLHFJobSpec, sizes: Sizes, parallelism: TrainingParallelism, microbatches: int) -> float:
    trained = graph_of(spec).trained
    stages = {role: parallelism.stages_of(role) for role in trained}
    if len(set(stages.values())) == 1:
        return microbatches / (microbatches + stages[trained[0]] - 1)
    parameters = {role: size.parameters if (size := sizes.get(role)) is not None else 1 for role in trained}
    taken = sum(parameters[role] * (microbatches + stages[role] - 1) for role in trained)
    return microbatches * sum(parameters.values()) / taken


def _possible(spec: RLHFJobSpec, sizes: Sizes, ranks: int) -> Iterator[TrainingParallelism]:
    """Yield the layouts of so many ranks that rules, layers and heads allow."""
    whole = spec.training.lora is None and spec.placement == "Dedicated" and not _trains_draft(spec)
    context = spec.training.parallelism.context
    ranks, left = divmod(ranks, context)
    for data in () if left else _divisors(ranks):
        if spec.algorithm.fields.mini_batch_size % (spec.training.micro_batch_size * data):
            continue
        for tensor in _divisors(ranks // data):
            pipeline = ranks // data // tensor
            if tensor > MAX_TENSOR or pipeline > MAX_PIPELINE:
                continue
            if tensor > 1 and not (whole and spec.training.backend == "megatron"):
                continue
            asked = spec.training.parallelism.sequence_parallel if tensor > 1 else "Disabled"
            parallelism = TrainingParallelism(
                pipeline=pipeline, data=data, context=context, tensor=tensor, sequence_parallel=asked
            )
            for layout in _with_critics(spec, parallelism):
                if _suits(spec, sizes, layout):
                    yield layout
                    if data * context > 1:
                        yield layout.model_copy(update={"shard_optimizer": True})
                    if whole and tensor == 1:
                        yield from _with_experts(spec, sizes, layout)
        if data == ranks and data * context > 1 and whole and spec.training.backend == "torch":
            yield TrainingParallelism(data=data, context=context, shard=data * context)


def _with_critics(spec: RLHFJobSpec, parallelism: TrainingParallelism) -> Iterator[TrainingParallelism]:
    """Yield a layout, and a variant with the job's tensor size for critics if it differs and divides a copy's ranks."""
    critic = spec.training.parallelism.critic_tensor
    if critic != parallelism.tensor:
        yield parallelism
    if critic is not None and parallelism.pipeline * parallelism.tensor % critic == 0:
        yield parallelism.model_copy(update={"critic_tensor": critic})


def _with_experts(spec: RLHFJobSpec, sizes: Sizes, parallelism: TrainingParallelism) -> Iterator[TrainingParallelism]:
    """Yield a layout for every number, above 1, of data and context ranks that can divide the experts of all trained
    models."""
    counts = [0 if (size := sizes.get(role)) is None else size.experts for role in graph_of(spec).trained]
    for expert in _divisors(parallelism.data * parallelism.context)[1:]:
        if all(count and count % expert == 0 for count in counts):
            yield parallelism.model_copy(update={"expert": expert})


def _suits(spec: RLHFJobSpec, sizes: Sizes, parallelism: TrainingParallelism) -> bool:
    """Return whether the trained models have a layer for each stage, heads that can be split, and no experts if split.

    If no model states its layers or heads, the job's own values count.
    """
    asked, trained = spec.training.parallelism, graph_of(spec).trained
    trained_sizes = {role: size for role in trained if (size := sizes.get(role)) is not None}
    layers = {role: size.layers for role, size in trained_sizes.items() if size.layers}
    heads = {role: size.key_value_heads for role, size in trained_sizes.items() if size.key_value_heads}
    if any(size.experts and parallelism.tensor_of(role) > 1 for role, size in trained_sizes.items()):
        return False
    layers = layers or {role: asked.stages_of(role) for role in trained}
    heads = heads or {role: asked.tensor_of(role) for role in trained}
    return all(parallelism.stages_of(role) <= count for role, count in layers.items()) and all(
        _splits(parallelism.tensor_of(role), count) for role, count in heads.items()
    )


def _trains_draft(spec: RLHFJobSpec) -> bool:
    draft = spec.generation.speculation.draft_model
    return draft is not None and draft.train == "Enabled"


def _splits(tensor: int, heads: int) -> bool:
    """Return whether heads can be split over so many ranks: a power of two that divides them."""
    return tensor & (tensor - 1) == 0 and heads % tensor == 0


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
