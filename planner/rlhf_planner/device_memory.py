"""Estimates the memory of a process on its device, by purpose, and by phase where roles take turns.

Counts weights, the KV cache, gradients and AdamW moments; not activations, logits, communicators and the runtime. The
total lacks models of unknown size, and the estimate names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import TrainingParallelism
from rlhf_api.job.lora import Lora
from rlhf_api.job.rewards import GivenReward
from rlhf_common.names import DRAFT_MODEL, Group

FLOAT32_BYTES: Final = 4
HALF_BYTES: Final = 2
COMPUTE_BYTES: Final = {"Float32": FLOAT32_BYTES, "BFloat16": HALF_BYTES}
"""Bytes per value in the type of matrix products."""
OPTIMIZER_BYTES: Final = 8
"""Bytes per parameter of the two float32 AdamW moments."""
OFFLOADED_PIECE_BYTES: Final = 64 * 2**20
"""Maximum bytes of both moments in one chunk that moves between host memory and the device."""
OFFLOADED_PIECES: Final = 2
"""Chunks that count as on the device at the same time."""
DRAFT: Final = "draft model"
"""Name of the part of an estimate that belongs to a draft model."""
GIBIBYTE: Final = 2**30
REMEDIES: Final = {
    "decoding and scoring": "lower spec.generation.maxBatchSize or spec.rollout.maxResponseTokens, or give scoring "
    "workers of its own (spec.inference.replicas, and spec.fusion.interStage.mode: Disabled)",
    "training": "raise spec.training.parallelism.pipeline and spec.generation.replicas with it",
}


@dataclass(frozen=True)
class ModelSize:
    """Size of a model, as its folder states it."""

    parameters: int
    cache_values_per_token: int
    """Number of key and value elements that all layers cache for one token."""
    map_widths: Mapping[str, int] = field(default_factory=dict)
    """Hugging Face name of a linear map -> inputs plus outputs, over all layers."""
    layers: int = 0
    """Number of layers; 0 if unknown."""
    key_value_heads: int = 0
    """Key-value heads per layer; 0 if unknown."""
    experts: int = 0
    """Experts per layer that routes tokens; 0 without experts."""
    expert_parameters: int = 0
    """Number of `parameters` that belong to experts, over all layers."""

    def adapter_parameters(self, lora: Lora) -> int | None:
        """Return the number of adapter parameters of this model; None if the width of a target map is unknown."""
        if not set(lora.target_modules) <= self.map_widths.keys():
            return None
        return lora.rank * sum(self.map_widths[name] for name in lora.target_modules)


@dataclass(frozen=True)
class Estimate:
    """Estimated memory of one device, in bytes by purpose."""

    parts: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    """Models of unknown size, and other parts that are not counted."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of pinned host memory by purpose, for data that is copied to the device in chunks."""

    @property
    def total(self) -> int:
        """Total bytes of all known parts."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """Names and sizes of the parts, such as `weights 1 GiB, gradients 2 GiB`."""
        return ", ".join(f"{name} {gib(count)}" for name, count in self.parts.items())


@dataclass(frozen=True)
class Phase:
    """Roles that are awake on a worker's device at the same time."""

    name: str
    onloaded: Estimate


@dataclass(frozen=True)
class Budget:
    """Memory of a worker whose roles take turns: one phase at a time on the device, sleeping roles in host memory."""

    phases: tuple[Phase, ...]
    host: Estimate = field(default_factory=lambda: Estimate({}))
    """Pinned host memory of one process, summed over all roles; no bytes without GPUs."""

    @property
    def peak(self) -> Phase:
        """Phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.onloaded.total)

    def problem(self, device_bytes: int) -> str:
        """Return that the estimate exceeds a device of this size, and what to do; empty if it does not."""
        peak = self.peak
        if peak.onloaded.total <= device_bytes:
            return ""
        needed = peak.onloaded
        return (
            f"phase {peak.name} needs {gib(needed.total)} a device ({needed.words}), which has {gib(device_bytes)}: "
            f"{REMEDIES[peak.name]}, or use spec.placement: Dedicated"
        )


Sizes = Mapping[str, ModelSize | None]
"""Model role, `reward_model` or DRAFT_MODEL -> size; None if unknown."""


def reward_model(reward: GivenReward) -> str:
    """Return the name of a reward model in `Sizes` and in the parts of an estimate."""
    return f"{reward.role} {reward.name}".strip()


def estimates(spec: RLHFJobSpec, sizes: Sizes) -> dict[Group, Estimate]:
    """Return the memory of one device by group.

    Where roles take turns, generation has the phase that needs the most memory.
    """
    scorers = {Group.INFERENCE: scoring(spec, sizes)}
    if spec.rank_group is Group.TRAINING:
        trains = training(spec, sizes)
        return scorers | {Group.GENERATION: decoding_and_scoring(spec, sizes), Group.TRAINING: trains}
    return scorers | {Group.GENERATION: budget(spec, sizes).peak.onloaded}


def budget(spec: RLHFJobSpec, sizes: Sizes) -> Budget:
    """Return the memory of a generation worker that also holds a training rank."""
    gpus = spec.generation.gpus_per_replica
    decodes, trains = decoding(spec, sizes), training(spec, sizes)
    scores = scoring(spec, sizes) if _scores_too(spec) else Estimate({})
    sleeping = {f"{name} (decoding)": count for name, count in decodes.parts.items() if name == "weights"}
    sleeping |= scores.parts
    resident = ("weights", "optimizer", "frozen weights")
    sleeping |= {
        f"{name} (training)": count for name, count in {**trains.parts, **trains.host}.items() if name in resident
    }
    if spec.training.weight_sharing != "Disabled" and "weights" in trains.parts:  # one copy, in the published type
        sleeping["published weights"] = _published(spec, sizes)
    return Budget(
        (Phase("decoding and scoring", decoding_and_scoring(spec, sizes)), Phase("training", trains)),
        Estimate(sleeping if gpus else {}, _sum(decodes, scores, trains).unknown),
    )


def decoding_and_scoring(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of a device of a generation worker, with the scoring models where it has or may load them."""
    decodes = decoding(spec, sizes)
    return _sum(decodes, scoring(spec, sizes)) if _scores_too(spec) else decodes


def _scores_too(spec: RLHFJobSpec) -> bool:
    """Return whether generation workers have, or may load, the scoring models in addition to the policy."""
    fuses = (
        spec.fusion.inter_stage.mode != "Disabled"
        and spec.generation.replicas > 1
        and spec.inference.overlap != "Disabled"
    )
    return not spec.inference.replicas or fuses


def decoding(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the policy, the KV pool and a draft model, if any, on each device of a generation worker."""
    role = graph_of(spec).policy
    policy = sizes.get(role)
    if policy is None:
        return Estimate({}, (role,))
    width, devices = COMPUTE_BYTES[spec.compute_type], spec.generation.parallelism.tensor
    tokens = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    cache = spec.generation.max_batch_size * tokens * policy.cache_values_per_token * width
    parts = {"weights": policy.parameters * width // devices, "key-value cache": cache // devices}
    if not _drafts_by_model(spec):
        return Estimate(parts)
    draft = sizes.get(DRAFT_MODEL)
    if draft is None:
        return Estimate(parts, (DRAFT_MODEL,))
    cached = spec.generation.max_batch_size * tokens * draft.cache_values_per_token
    return Estimate(parts | {DRAFT: (draft.parameters + cached) * width})


def scoring(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the scoring models that `sizes` contains."""
    models, width, graph = _scored(spec), COMPUTE_BYTES[spec.compute_type], graph_of(spec)
    names = [name for name in models if name in sizes]
    parameters = {name: size.parameters for name in names if (size := sizes[name]) is not None}
    policies = any((role := models[name]) is not None and role.kind is ModelKind.POLICY for name in parameters)
    for name in parameters:  # a critic over the reference's weights adds only its adapters
        role, size = models[name], sizes[name]
        lora = spec.training.adapters(role) if role in graph.trained else None
        if size is not None and lora is not None and lora.trunk == "Shared" and policies:
            parameters[name] = size.adapter_parameters(lora) or size.parameters
    unknown = tuple(name for name in names if sizes[name] is None)
    return Estimate({f"{name} weights": count * width for name, count in parameters.items()}, unknown)


def training(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of a rank: its part of each trained model, and a trained draft model as a whole.

    Pipeline stages count as equal in size. A shared trunk counts once.
    """
    settings, models = spec.training, graph_of(spec).trained
    half, shared = spec.compute_type == "BFloat16", False
    unknown: list[str] = []
    parts: dict[str, int] = {}
    for role in models:
        size, lora = sizes.get(role), settings.adapters(role)
        trained = None if size is None else size.parameters if lora is None else size.adapter_parameters(lora)
        if size is None or trained is None:
            unknown.append(role)
            continue
        item = {"weights": FLOAT32_BYTES, "gradients": FLOAT32_BYTES, "optimizer": OPTIMIZER_BYTES}
        item |= {"half-precision weights": HALF_BYTES} if half else {}
        if settings.parallelism.shard > 1:  # layers are cast one at a time
            item = {name: count for name, count in item.items() if name != "half-precision weights"}
        if settings.parallelism.shard * settings.parallelism.tensor_of(role) > 1:  # whole, spread over ranks
            item["published weights"] = FLOAT32_BYTES
        for name, count in item.items():
            parts[name] = parts.get(name, 0) + _share(settings.parallelism, size, trained, name == "optimizer") * count
        if settings.parallelism.expert > 1:
            published = -(-size.expert_parameters // settings.parallelism.keepers) * FLOAT32_BYTES
            parts["published weights"] = parts.get("published weights", 0) + published
        if lora is not None and not (lora.trunk == "Shared" and shared):
            stage = -(-size.parameters // settings.parallelism.pipeline) * COMPUTE_BYTES[spec.compute_type]
            parts["frozen weights"] = parts.get("frozen weights", 0) + stage
            shared = True
    moments = 0
    draft = spec.generation.speculation.draft_model
    if draft is not None and draft.train == "Enabled":
        size = sizes.get(DRAFT_MODEL)
        whole = 2 * FLOAT32_BYTES + (HALF_BYTES if half else 0)
        moments = 0 if size is None else size.parameters * OPTIMIZER_BYTES
        parts |= {} if size is None else {DRAFT: size.parameters * whole + moments}
        unknown += [DRAFT_MODEL] if size is None else []
    offloaded = parts.get("optimizer", 0) + moments if settings.parallelism.offload_optimizer else 0
    if not offloaded:
        return Estimate(parts, tuple(unknown))
    host = {"optimizer": offloaded}
    parts |= {"optimizer": min(host["optimizer"], OFFLOADED_PIECES * OFFLOADED_PIECE_BYTES)}
    parts |= {DRAFT: parts[DRAFT] - moments} if moments else {}
    return Estimate(parts, tuple(unknown), host)


def _share(parallelism: TrainingParallelism, size: ModelSize, trained: int, moments: bool) -> int:
    """Return how many of a model's trained parameters, or of their moments, a rank has."""
    ranks = parallelism.writers if moments else parallelism.keepers
    if parallelism.expert == 1:
        return -(-trained // ranks)
    others = trained - size.expert_parameters  # every rank of an expert group has these
    return -(-size.expert_parameters // ranks) + -(-others * parallelism.expert // ranks)


def _scored(spec: RLHFJobSpec) -> dict[str, ModelRole]:
    """Return the models that score responses, by name; each reward that is a model has its own entry."""
    models: dict[str, ModelRole] = {}
    for task in graph_of(spec).tasks_of(Group.INFERENCE):
        role = task.model
        rewards = spec.models.rewards_of(role) if role.kind is ModelKind.REWARD else ()
        models |= {reward_model(reward): role for reward in rewards} if rewards else {role: role}
    return models


def _drafts_by_model(spec: RLHFJobSpec) -> bool:
    speculation = spec.generation.speculation
    return speculation.mode != "Disabled" and "Model" in speculation.drafters


def _published(spec: RLHFJobSpec, sizes: Sizes) -> int:
    """Return the bytes of one rank's copy of the weights it publishes, for models of known size."""
    total = 0
    for role in graph_of(spec).trained:
        size, lora = sizes.get(role), spec.training.adapters(role)
        if size is None:
            continue
        alone = size.adapter_parameters(lora) if lora is not None and lora.publish == "Adapters" else None
        whole = size.parameters * COMPUTE_BYTES[spec.compute_type] if alone is None else alone * FLOAT32_BYTES
        total += -(-whole // spec.training.parallelism.stages_of(role))
    return total


def _sum(*found: Estimate) -> Estimate:
    parts: dict[str, int] = {}
    for estimate in found:
        for name, count in estimate.parts.items():
            parts[name] = parts.get(name, 0) + count
    return Estimate(parts, tuple(dict.fromkeys(role for estimate in found for role in estimate.unknown)))


def gib(count: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / GIBIBYTE:.3g} GiB"
