"""Memory that each process of a job needs on its device, by what it is for; where roles take turns, phase by phase.

Counted: weights; on workers that decode the key-value cache at the full batch and the longest samples; on training
ranks float32 master weights, gradients and the two AdamW moments, and weights once more in half precision where they
are cast. Not counted: activations, logits, communicators, the runtime itself. So what does not fit here fits nowhere,
and what fits here may still not.
Rule: arithmetic over sizes that come in; a model of unknown size is said to be, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rlhf_api.algorithms import ModelRole, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import Group

FLOAT32_BYTES: Final = 4
HALF_BYTES: Final = 2
COMPUTE_BYTES: Final = {"Float32": FLOAT32_BYTES, "BFloat16": HALF_BYTES}
"""A value in the type of matrix products."""
OPTIMIZER_BYTES: Final = 8
"""Two float32 moments of AdamW, a parameter."""
GIBIBYTE: Final = 2**30
REMEDIES: Final = {
    "decoding and scoring": "lower spec.generation.maxBatchSize or spec.rollout.maxResponseTokens, or give scoring "
    "workers of its own (spec.inference.replicas, and spec.fusion.interStage.mode: Disabled)",
    "training": "raise spec.training.parallelism.pipeline and spec.generation.replicas with it",
}


@dataclass(frozen=True)
class ModelSize:
    """What a model folder says about its size."""

    parameters: int
    cache_values_per_token: int
    """Keys and values of all layers, for one token."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one process, in bytes by what it is for."""

    parts: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    """Model roles whose size is not known here."""

    @property
    def total(self) -> int:
        """Bytes of all known parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Phase:
    """What is awake on the device of a worker at one time."""

    name: str
    onloaded: Estimate


@dataclass(frozen=True)
class Budget:
    """A worker whose roles take turns: the device holds one phase at a time, the host what sleeps meanwhile."""

    phases: tuple[Phase, ...]
    host: Estimate = field(default_factory=lambda: Estimate({}))
    """Pinned memory of the machine, one process: kept from the first turn on, so it is the sum of all roles."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.onloaded.total)

    def problem(self, device_bytes: int) -> str:
        """Return why it cannot fit on a device of this size, and what to do; empty when nothing says so."""
        peak = self.peak
        if peak.onloaded.total <= device_bytes:
            return ""
        parts = ", ".join(f"{name} {_gib(count)}" for name, count in peak.onloaded.parts.items())
        return (
            f"phase {peak.name} needs {_gib(peak.onloaded.total)} a device ({parts}), which has {_gib(device_bytes)}: "
            f"{REMEDIES[peak.name]}, or use spec.placement: Dedicated"
        )


Sizes = Mapping[ModelRole, ModelSize | None]
"""Model role -> its size; None: not known."""


def estimates(spec: RLHFJobSpec, sizes: Sizes) -> dict[Group, Estimate]:
    """Return the memory of one process of each group that has workers of its own; for training, of the largest
    pipeline stage; where roles take turns, of the phase that needs most."""
    scorers = {Group.INFERENCE: scoring(spec, sizes)}
    if spec.rank_group is Group.TRAINING:
        trains = training(spec, sizes)
        return scorers | {Group.GENERATION: decoding(spec, sizes), Group.TRAINING: trains}
    return scorers | {Group.GENERATION: budget(spec, sizes).peak.onloaded}


def budget(spec: RLHFJobSpec, sizes: Sizes) -> Budget:
    """Return the memory of a generation worker that also holds a training rank."""
    gpus = spec.generation.gpus_per_replica
    decodes, trains = decoding(spec, sizes), training(spec, sizes)
    scores = scoring(spec, sizes) if scores_too(spec) else Estimate({})
    sleeping = {f"{name} (decoding)": count for name, count in decodes.parts.items() if name == "weights"}
    sleeping |= scores.parts
    kept = ("weights", "optimizer")
    sleeping |= {f"{name} (training)": count for name, count in trains.parts.items() if name in kept}
    return Budget(
        (Phase("decoding and scoring", _sum(decodes, scores)), Phase("training", trains)),
        Estimate(sleeping if gpus else {}, _sum(decodes, scores, trains).unknown),
    )


def scores_too(spec: RLHFJobSpec) -> bool:
    """Return whether generation workers hold the scoring models besides the policy, or may."""
    fuses = (
        spec.fusion.inter_stage.mode != "Disabled"
        and spec.generation.replicas > 1
        and spec.inference.overlap != "Disabled"
    )
    return not spec.inference.replicas or fuses


def decoding(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the policy and the KV pool of a generation worker."""
    role = graph_of(spec).policy
    policy = sizes.get(role)
    if policy is None:
        return Estimate({}, (role,))
    width = COMPUTE_BYTES[spec.compute_type]
    tokens = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    cache = spec.generation.max_batch_size * tokens * policy.cache_values_per_token * width
    return Estimate({"weights": policy.parameters * width, "key-value cache": cache})


def scoring(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the models of the scoring tasks; a reward that is no model is not in `sizes`."""
    roles = [task.model for task in graph_of(spec).tasks_of(Group.INFERENCE) if task.model in sizes]
    width = COMPUTE_BYTES[spec.compute_type]
    known = {role: size for role in roles if (size := sizes[role]) is not None}
    unknown = tuple(role for role in roles if sizes[role] is None)
    return Estimate({f"{role} weights": size.parameters * width for role, size in known.items()}, unknown)


def training(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the largest stage of every trained model."""
    settings, models = spec.training, graph_of(spec).trained
    half = spec.compute_type == "BFloat16"
    parts: dict[str, int] = {}
    for size in (sizes.get(role) for role in models):
        if size is not None:
            stage = -(-size.parameters // settings.parallelism.pipeline)
            item = {"weights": FLOAT32_BYTES, "gradients": FLOAT32_BYTES, "optimizer": OPTIMIZER_BYTES}
            item |= {"half-precision weights": HALF_BYTES} if half else {}
            for name, count in item.items():
                parts[name] = parts.get(name, 0) + stage * count
    return Estimate(parts, tuple(role for role in models if sizes.get(role) is None))


def _sum(*found: Estimate) -> Estimate:
    parts: dict[str, int] = {}
    for one in found:
        for name, count in one.parts.items():
            parts[name] = parts.get(name, 0) + count
    return Estimate(parts, tuple(dict.fromkeys(role for one in found for role in one.unknown)))


def _gib(count: int) -> str:
    return f"{count / GIBIBYTE:.3g} GiB"
