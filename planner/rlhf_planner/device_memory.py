"""Memory that each process of a job needs on its device, by what it is for; where roles take turns, phase by phase.

Counted: weights; on workers that decode the key-value cache at the full batch and the longest samples, of a draft model
likewise; on training ranks float32 master weights, gradients and the two AdamW moments, and weights once more in half
precision where they are cast, of a draft model that is trained likewise; of models in parts (parallelism.shard and
parallelism.tensor, of experts parallelism.expert) a rank's part of each, and its share of whole parameters to publish.
Norms, which every rank of a
tensor group has, count as if they were split, and shares of moments (parallelism.shardOptimizer) as if all were equal.
Moments in host memory (parallelism.offloadOptimizer) count as the pieces of them that are on the device within a step.
Not counted: gathered layers, activations, logits, communicators, the
runtime itself. So what does not fit here fits nowhere, and what fits here may still not.
Rule: arithmetic over sizes that come in; a model of unknown size is said to be, never zero.
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
"""A value in the type of matrix products."""
OPTIMIZER_BYTES: Final = 8
"""Two float32 moments of AdamW, a parameter."""
OFFLOADED_PIECE_BYTES: Final = 64 * 2**20
"""Moments that come from host memory at a time: takes above a millisecond on the bus, beside which it costs nothing to
begin a copy and a kernel, and is little beside what a step holds."""
OFFLOADED_PIECES: Final = 2
"""On the device at once: one is stepped while another comes or goes."""
DRAFT: Final = "draft model"
"""Part of an estimate: all that a process holds of it."""
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
    map_widths: Mapping[str, int] = field(default_factory=dict)
    """Linear map of a layer, by its Hugging Face name -> its inputs and outputs, added up over all layers."""
    layers: int = 0
    """0: the folder does not say."""
    key_value_heads: int = 0
    """Of a layer; 0: the folder does not say."""
    experts: int = 0
    """Of a layer that routes tokens; 0: there is none."""
    expert_parameters: int = 0
    """Those of `parameters` that are of experts, over all layers."""

    def adapter_parameters(self, lora: Lora) -> int | None:
        """Return the parameters of the adapters of this model; None where its maps are not known."""
        if not set(lora.target_modules) <= self.map_widths.keys():
            return None
        return lora.rank * sum(self.map_widths[name] for name in lora.target_modules)


@dataclass(frozen=True)
class Estimate:
    """Memory of one process, in bytes by what it is for."""

    parts: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    """Models whose size is not known here."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Pinned memory of the machine beside it, for what comes to the device a piece at a time."""

    @property
    def total(self) -> int:
        """Bytes of all known parts."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """The parts: `weights 1 GiB, gradients 2 GiB`."""
        return ", ".join(f"{name} {gib(count)}" for name, count in self.parts.items())


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
        needed = peak.onloaded
        return (
            f"phase {peak.name} needs {gib(needed.total)} a device ({needed.words}), which has {gib(device_bytes)}: "
            f"{REMEDIES[peak.name]}, or use spec.placement: Dedicated"
        )


Sizes = Mapping[str, ModelSize | None]
"""Model role, `reward_model` or DRAFT_MODEL -> its size; None: not known."""


def reward_model(reward: GivenReward) -> str:
    """Return the name of the model that inference workers run for a reward, in sizes and parts."""
    return f"{reward.role} {reward.name}".strip()


def estimates(spec: RLHFJobSpec, sizes: Sizes) -> dict[Group, Estimate]:
    """Return the memory of one device of each group that has workers of its own; for training, of the largest
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
    kept = ("weights", "optimizer", "frozen weights")
    sleeping |= {f"{name} (training)": count for name, count in {**trains.parts, **trains.host}.items() if name in kept}
    if spec.training.weight_sharing != "Disabled" and "weights" in trains.parts:  # one copy, in the type that travels
        sleeping["published weights"] = _published(spec, sizes)
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
    """Return the memory of the policy, the KV pool and a draft model on each device of a generation worker."""
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
    """Return the memory of the models of the scoring tasks; a reward that is called is not in `sizes`."""
    models, width, graph = _scored(spec), COMPUTE_BYTES[spec.compute_type], graph_of(spec)
    names = [name for name in models if name in sizes]
    known = {name: size.parameters for name in names if (size := sizes[name]) is not None}
    policies = any((role := models[name]) is not None and role.kind is ModelKind.POLICY for name in known)
    for name in known:  # a critic over the reference's weights has its adapters alone
        role, size = models[name], sizes[name]
        lora = spec.training.adapters(role) if role in graph.trained else None
        if size is not None and lora is not None and lora.trunk == "Shared" and policies:
            known[name] = size.adapter_parameters(lora) or size.parameters
    unknown = tuple(name for name in names if sizes[name] is None)
    return Estimate({f"{name} weights": count * width for name, count in known.items()}, unknown)


def training(spec: RLHFJobSpec, sizes: Sizes) -> Estimate:
    """Return the memory of the largest stage of every trained model, and of a draft model, which the rank of the last
    stage holds whole; of one trained by adapters the frozen weights
    are apart from what is trained, and counted once where the trunk is shared."""
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
        if settings.parallelism.shard * settings.parallelism.tensor_of(role) > 1:  # kept whole, shared out
            item["published weights"] = FLOAT32_BYTES
        for name, count in item.items():
            parts[name] = parts.get(name, 0) + _share(settings.parallelism, size, trained, name == "optimizer") * count
        if settings.parallelism.expert > 1:
            kept = -(-size.expert_parameters // settings.parallelism.keepers) * FLOAT32_BYTES
            parts["published weights"] = parts.get("published weights", 0) + kept
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
    """Return how many of a model's trained parameters a rank has, or has the moments of."""
    ranks = parallelism.writers if moments else parallelism.keepers
    if parallelism.expert == 1:
        return -(-trained // ranks)
    others = trained - size.expert_parameters  # which every rank of an expert group has
    return -(-size.expert_parameters // ranks) + -(-others * parallelism.expert // ranks)


def _scored(spec: RLHFJobSpec) -> dict[str, ModelRole]:
    """Return the models that score responses, by name; of several rewards each that is a model."""
    models: dict[str, ModelRole] = {}
    for task in graph_of(spec).tasks_of(Group.INFERENCE):
        role = task.model
        rewards = spec.models.rewards_of(role) if role.kind is ModelKind.REWARD else ()
        models |= {reward_model(given): role for given in rewards} if rewards else {role: role}
    return models


def _drafts_by_model(spec: RLHFJobSpec) -> bool:
    speculation = spec.generation.speculation
    return speculation.mode != "Disabled" and "Model" in speculation.drafters


def _published(spec: RLHFJobSpec, sizes: Sizes) -> int:
    """Return the bytes of one rank's copy of what it publishes; of models of known size."""
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
    for one in found:
        for name, count in one.parts.items():
            parts[name] = parts.get(name, 0) + count
    return Estimate(parts, tuple(dict.fromkeys(role for one in found for role in one.unknown)))


def gib(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / GIBIBYTE:.3g} GiB"
