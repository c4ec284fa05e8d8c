"""The problem that a fused pipeline schedule solves: devices, pipelines, times, activations, one memory cap.

Times share any unit, and so do activations. Source: RLHFuse (arXiv 2409.13221), intra-stage fusion; the split of the
backward step follows zero-bubble pipelines.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_STEPS = 2_000_000  # maximum steps of one instance; 64 devices x 256 micro-batches x 2 models is 65 thousand


class InstanceError(ValueError):
    """An invalid field of an instance, a schedule or search options. The message names the field, its value and valid
    values."""

    def __init__(self, field: str, value: object, right: str) -> None:
        self.field, self.value = field, value
        super().__init__(f"{field}: {value!r} is not valid; {right}")


@dataclass(frozen=True, slots=True)
class InstancePipeline:
    """One pipeline of one model. Every tuple but `transfer` has one value per stage.

    `weight_gradient` is the part of `backward` that may run later (0: the stage cannot be split). `activation` is
    occupied from the start of a forward step to the end of its backward step, or weight-gradient step if split.
    `transfer[e]` is the time between stages e and e + 1.
    """

    name: str
    stage_devices: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    activation: tuple[float, ...]
    transfer: tuple[float, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_devices)

    def lag(self, edge: int) -> float:
        """Return the time from the end of a step on stage `edge` to the earliest start on stage `edge + 1`, or back.

        The time is 0 within a device.
        """
        same = self.stage_devices[edge] == self.stage_devices[edge + 1]
        return 0.0 if same else self.transfer[edge]


@dataclass(frozen=True, slots=True)
class Instance:
    """Pipelines that share devices.

    A `memory_cap` of None means no cap.
    """

    devices: int
    pipelines: tuple[InstancePipeline, ...]
    memory_cap: float | None = None

    def __post_init__(self) -> None:
        check_instance(self)

    @property
    def steps(self) -> int:
        """Number of forward and backward steps of all stages and micro-batches (a split backward counts once)."""
        return sum(2 * p.stages * p.microbatches for p in self.pipelines)

    def with_cap(self, cap: float | None) -> Instance:
        """Return the instance with another memory cap, in activation units; None means no cap."""
        return replace(self, memory_cap=cap)

    def key(self) -> str:
        """Return the SHA-256 of the canonical JSON."""
        text = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def check_instance(instance: Instance) -> None:
    """Raise InstanceError for the first invalid field."""
    if instance.devices < 1:
        raise InstanceError("devices", instance.devices, "at least one device is needed")
    if not instance.pipelines:
        raise InstanceError("pipelines", [], "at least one pipeline is needed")
    for index, pipeline in enumerate(instance.pipelines):
        _check_pipeline(f"pipelines[{index}]", pipeline, instance.devices)
    if instance.steps > MAX_STEPS:
        raise InstanceError("pipelines", f"{instance.steps} steps", f"at most {MAX_STEPS} steps can be scheduled")
    cap = instance.memory_cap
    if cap is None:
        return
    if not math.isfinite(cap) or cap <= 0:
        raise InstanceError("memoryCap", cap, "give a positive number, or null for no cap")
    for index, pipeline in enumerate(instance.pipelines):
        for stage, activation in enumerate(pipeline.activation):
            if activation > cap:
                where = f"pipelines[{index}].activation[{stage}] = {activation}"
                raise InstanceError("memoryCap", cap, f"it is below one micro-batch ({where}), so nothing can run")


def _check_pipeline(at: str, pipeline: InstancePipeline, devices: int) -> None:
    if not pipeline.stage_devices:
        raise InstanceError(f"{at}.stageDevices", [], "a pipeline has at least one stage")
    for stage, device in enumerate(pipeline.stage_devices):
        if not 0 <= device < devices:
            raise InstanceError(f"{at}.stageDevices[{stage}]", device, f"devices are numbered 0 to {devices - 1}")
    if pipeline.microbatches < 1:
        raise InstanceError(f"{at}.microbatches", pipeline.microbatches, "give at least 1")
    for stage in range(pipeline.stages):
        _check_time(f"{at}.forward[{stage}]", pipeline.forward[stage], positive=True)
        _check_time(f"{at}.backward[{stage}]", pipeline.backward[stage], positive=True)
        _check_time(f"{at}.weightGradient[{stage}]", pipeline.weight_gradient[stage])
        _check_time(f"{at}.activation[{stage}]", pipeline.activation[stage])
        if pipeline.weight_gradient[stage] >= pipeline.backward[stage]:
            right = f"it is part of backward ({pipeline.backward[stage]}) and must be smaller"
            raise InstanceError(f"{at}.weightGradient[{stage}]", pipeline.weight_gradient[stage], right)
    for edge, time in enumerate(pipeline.transfer):
        _check_time(f"{at}.transfer[{edge}]", time)


def _check_time(field: str, value: float, positive: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise InstanceError(field, value, "give a number above 0" if positive else "give a number of at least 0")


_INSTANCE_FIELDS = {"devices", "pipelines", "memoryCap", "transfer"}
_PIPELINE_FIELDS = {
    "name", "stageDevices", "microbatches", "forward", "backward", "weightGradient", "activation", "transfer",
}  # fmt: skip


def from_json(data: object) -> Instance:
    """Return the Instance of its JSON form (docs/schedules.md).

    Raises InstanceError for unknown, missing, mistyped and invalid fields.
    """
    top = _fields("instance", data, _INSTANCE_FIELDS, required={"devices", "pipelines"})
    devices = _whole("devices", top["devices"])
    listed = top["pipelines"]
    if not isinstance(listed, list):
        raise InstanceError("pipelines", listed, "give a list of pipelines")
    transfer = top.get("transfer", 0)
    cap = top.get("memoryCap")
    pipelines = tuple(_pipeline(f"pipelines[{i}]", entry, i, transfer) for i, entry in enumerate(listed))
    return Instance(devices, pipelines, None if cap is None else _number("memoryCap", cap))


def _pipeline(at: str, data: object, index: int, transfer: object) -> InstancePipeline:
    required = {"stageDevices", "microbatches", "forward", "backward"}
    entry = _fields(at, data, _PIPELINE_FIELDS, required)
    listed = entry["stageDevices"]
    if not isinstance(listed, list):
        raise InstanceError(f"{at}.stageDevices", listed, "give a list with the device of every stage")
    devices = tuple(_whole(f"{at}.stageDevices[{s}]", d) for s, d in enumerate(listed))
    stages = len(devices)

    def per_stage(field: str, default: float) -> tuple[float, ...]:
        return _numbers(f"{at}.{field}", entry.get(field, default), stages, "stage")

    where = f"{at}.transfer" if "transfer" in entry else "transfer"
    return InstancePipeline(
        name=str(entry.get("name", f"pipeline{index}")),
        stage_devices=devices,
        microbatches=_whole(f"{at}.microbatches", entry["microbatches"]),
        forward=per_stage("forward", 0),
        backward=per_stage("backward", 0),
        weight_gradient=per_stage("weightGradient", 0),
        activation=per_stage("activation", 0),
        transfer=_numbers(where, entry.get("transfer", transfer), max(stages - 1, 0), "edge between stages"),
    )


def to_json(instance: Instance) -> dict[str, Any]:
    """Return the JSON form of an instance with every list expanded. `from_json` returns an equal instance."""
    return {
        "devices": instance.devices,
        "memoryCap": instance.memory_cap,
        "pipelines": [
            {
                "name": p.name,
                "stageDevices": list(p.stage_devices),
                "microbatches": p.microbatches,
                "forward": list(p.forward),
                "backward": list(p.backward),
                "weightGradient": list(p.weight_gradient),
                "activation": list(p.activation),
                "transfer": list(p.transfer),
            }
            for p in instance.pipelines
        ],
    }


def _fields(at: str, data: object, fields: set[str], required: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InstanceError(at, data, "give an object")
    prefix = "" if at == "instance" else f"{at}."
    for name in data:
        if name not in fields:
            raise InstanceError(f"{prefix}{name}", data[name], f"unknown field; known are {', '.join(sorted(fields))}")
    for name in sorted(required):
        if name not in data:
            raise InstanceError(f"{prefix}{name}", None, "the field is required")
    return data


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InstanceError(field, value, "give a number")
    try:
        return float(value)
    except OverflowError:
        raise InstanceError(field, value, "give a number that a float can hold") from None


def _whole(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InstanceError(field, value, "give a whole number")
    return value


def _numbers(field: str, value: object, count: int, per: str) -> tuple[float, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise InstanceError(field, list(value), f"give one number, or {count}: one a {per}")
        return tuple(_number(f"{field}[{i}]", entry) for i, entry in enumerate(value))
    return (_number(field, value),) * count
