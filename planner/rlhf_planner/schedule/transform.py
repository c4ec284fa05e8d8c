"""From the parallelism of two models to an instance: equal stages, opposite pipelines, one block of data parallelism.

Rules, from RLHFuse (arXiv 2409.13221), intra-stage fusion:
  - tensor-parallel degrees are powers of two; where they differ, neighbouring stages of the model with the smaller
  degree
    are merged (a pipeline of the ratio times fewer stages), so that every stage of both models uses the same GPUs;
  - a block holds K1 pipelines of model 1 and K2 of model 2 on K1 * N1 = K2 * N2 devices, K1 and K2 least; blocks
  repeat by
    data parallelism; the second model's pipelines run in the opposite direction;
  - micro-batches of a pipeline are mini-batch / (data-parallel degree * micro-batch size).
Sizes that do not divide are errors that name the field; nothing is padded silently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_planner.schedule.instance import Instance, InstanceError, InstancePipeline


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """One model as it is trained: parallelism, batch, and costs of one stage (times of one micro-batch).

    `forward`, `backward`, `weight_gradient` and `activation` hold one value per stage (before any merging).
    """

    name: str
    tensor: int
    stages: int
    data: int
    microbatch_size: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    activation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The instance of one block, and how often it is repeated. One device of the instance is `gpus_per_device` GPUs.

    `copies[p]`: the model (0 or 1) and the number of its copy that pipeline p of the instance is.
    """

    instance: Instance
    gpus_per_device: int
    repeats: int
    copies: tuple[tuple[int, int], ...]


def fused_block(
    first: ModelLayout, second: ModelLayout, mini_batch: int, memory_cap: float | None = None, transfer: float = 0.0
) -> Block:
    """Return the block of a pair of models that train at the same time; InstanceError names the field that does not
    fit."""
    for at, model in (("first", first), ("second", second)):
        _check(at, model)
    tensor = max(first.tensor, second.tensor)
    merged = tuple(_merge(at, m, tensor // m.tensor) for at, m in (("first", first), ("second", second)))
    devices = math.lcm(merged[0].stages, merged[1].stages)
    copies = tuple(devices // model.stages for model in merged)
    for index, at in enumerate(("first", "second")):
        if merged[index].data % copies[index]:
            right = f"a block holds {copies[index]} of its pipelines, so it must be a multiple of that"
            raise InstanceError(f"{at}.data", merged[index].data, right)
    repeats = {merged[index].data // copies[index] for index in (0, 1)}
    if len(repeats) > 1:
        sizes = tuple(model.tensor * model.stages * model.data for model in (first, second))
        raise InstanceError("second.data", second.data, f"both models must use the same GPUs, they use {sizes}")
    pipelines, owners = [], []
    for index, at in enumerate(("first", "second")):
        microbatches = _microbatches(at, merged[index], mini_batch)
        for copy in range(copies[index]):
            on = tuple(range(copy * merged[index].stages, (copy + 1) * merged[index].stages))
            devices_of = on if index == 0 else on[::-1]
            pipelines.append(_pipeline(merged[index], devices_of, copies[index], copy, microbatches, transfer))
            owners.append((index, copy))
    instance = Instance(devices, tuple(pipelines), memory_cap)
    return Block(instance, tensor, repeats.pop(), tuple(owners))


def _check(at: str, model: ModelLayout) -> None:
    for field in ("tensor", "stages", "data", "microbatch_size"):
        value = getattr(model, field)
        if value < 1:
            raise InstanceError(f"{at}.{field}", value, "give at least 1")
    if model.tensor & (model.tensor - 1):
        raise InstanceError(f"{at}.tensor", model.tensor, "tensor-parallel degrees are powers of two")
    for field in ("forward", "backward", "weight_gradient", "activation"):
        if len(getattr(model, field)) != model.stages:
            raise InstanceError(f"{at}.{field}", getattr(model, field), f"give {model.stages} values, one per stage")


def _merge(at: str, model: ModelLayout, ratio: int) -> ModelLayout:
    """Merge `ratio` neighbouring stages. On ratio times the GPUs a merged stage takes as long as one of them did."""
    if ratio == 1:
        return model
    if model.stages % ratio:
        raise InstanceError(f"{at}.stages", model.stages, f"{ratio} neighbouring stages are merged, so it must divide")

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[i : i + ratio]) / ratio for i in range(0, len(values), ratio))

    return ModelLayout(
        name=model.name,
        tensor=model.tensor * ratio,
        stages=model.stages // ratio,
        data=model.data,
        microbatch_size=model.microbatch_size,
        forward=mean(model.forward),
        backward=mean(model.backward),
        weight_gradient=mean(model.weight_gradient),
        activation=mean(model.activation),
    )


def _microbatches(at: str, model: ModelLayout, mini_batch: int) -> int:
    share = model.data * model.microbatch_size
    if mini_batch < 1 or mini_batch % share:
        right = f"it must be a multiple of {share} ({at}: data-parallel degree times micro-batch size)"
        raise InstanceError("mini_batch", mini_batch, right)
    return mini_batch // share


def _pipeline(
    model: ModelLayout, on: tuple[int, ...], copies: int, copy: int, microbatches: int, transfer: float
) -> InstancePipeline:
    return InstancePipeline(
        name=model.name if copies == 1 else f"{model.name}-{copy}",
        stage_devices=on,
        microbatches=microbatches,
        forward=model.forward,
        backward=model.backward,
        weight_gradient=model.weight_gradient,
        activation=model.activation,
        transfer=(transfer,) * (model.stages - 1),
    )
