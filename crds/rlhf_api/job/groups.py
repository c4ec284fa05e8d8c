"""`spec.generation`, `spec.inference`, `spec.training`: the three groups of worker processes; `spec.coordinator`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.api_model import ApiModel, PositiveOrOff

Mode = Literal["Disabled", "Auto"]
ComputeType = Literal["Float32", "BFloat16"]
"""Type of matrix products."""


class GroupFields(ApiModel):
    """What every group has."""

    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs a worker process; 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of the compute library on CPU; fixed, because results may depend on it."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Pod template merged under ours (image, volumes, node selectors, resources); a PodTemplateSpec."""


class Coordinator(ApiModel):
    """The process that moves samples between workers: one pod without GPUs."""

    template: dict[str, Any] = Field(default_factory=dict)
    """Pod template merged under ours (node selectors, resources, init containers); a PodTemplateSpec.
    Volumes, mounts and pull secrets of training pods are there already."""


class TensorParallelism(ApiModel):
    """How one generation replica is split."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel degree; a power of two that divides gpusPerReplica."""


class Speculation(ApiModel):
    """Speculative decoding in generation; lossless."""

    mode: Mode = "Auto"
    """Disabled decodes token by token; Auto drafts when it was measured to be faster."""


class Generation(GroupFields):
    """Workers that decode responses."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Workers; the scale subresource writes here."""
    engine: Literal["torch", "vllm"] = "torch"
    """Decoding engine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine untouched."""
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 64
    """Samples a worker decodes at once."""
    parallelism: TensorParallelism = Field(default_factory=TensorParallelism)
    """How one replica is split."""
    speculation: Speculation = Field(default_factory=Speculation)
    """Speculative decoding."""


class Inference(GroupFields):
    """Workers that score: reference log-probabilities, critic values, rewards."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Workers of their own; 0 leaves all scoring to generation workers that have nothing to decode."""
    overlap: Literal["Disabled", "Enabled"] = "Enabled"
    """Enabled scores each sample as it finishes, while others still decode; Disabled waits for the whole batch."""
    incremental: Literal["Disabled", "Auto", "Enabled"] = "Auto"
    """Enabled lets idle workers score chunks of responses that are still decoded, reference and critic alone, so that a
    finished one needs only its rest; Auto where simulation says that it is faster; Disabled
    never. Read with overlap Enabled."""
    batch_tokens: Annotated[int, Field(ge=1, le=16777216)] = 16384
    """Tokens scored in one forward pass (ignored in a deterministic job, which scores sample by sample)."""


class TrainingParallelism(ApiModel):
    """How a model is split over the training ranks; ranks = pipeline x data."""

    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    """Pipeline stages."""
    data: Annotated[int, Field(ge=1, le=4096)] = 1
    """Data parallel copies."""


Rate = Annotated[float, Field(gt=1e-12, le=1)]
"""A learning rate. What is smaller changes no float32 weight; what is larger AdamW steps by, whatever the gradient. The
bound is exclusive because the API server compares a whole number, such as 0, with the whole part of a bound."""


class Schedule(ApiModel):
    """The pipeline schedule of one model's training."""

    mode: Literal["Auto", "OneFOneB"] = "Auto"
    """OneFOneB is serial 1F1B, one model after the other."""


class Optimizer(ApiModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: Rate = 1e-6
    """Peak learning rate of the actor."""
    critic_learning_rate: Rate = 9e-6
    """Peak learning rate of the critic, of its own: a value head learns from nothing, a policy is only bent."""
    schedule: Literal["Constant", "Linear", "Cosine"] = "Constant"
    """Shape after warm-up, over all optimizer steps of the job; another number of iterations in a live job bends what
    is left of it, without a jump."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Linear and Cosine fall to this share of the peak."""
    warmup_steps: Annotated[int, Field(ge=0, le=2147483647)] = 0
    """Optimizer steps of linear warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """First moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Second moment decay."""
    epsilon: Annotated[float, Field(gt=1e-16, le=1)] = 1e-8
    """Term added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Decoupled weight decay of matrices (not of norms and biases)."""
    max_gradient_norm: PositiveOrOff = 1.0
    """Global gradient norm is clipped to this, over all stages; 0 turns clipping off."""
    max_non_finite_steps: Annotated[int, Field(ge=0, le=1000000)] = 5
    """Optimizer steps in a row whose gradient may be infinite or NaN: each is skipped and counted, one more fails the
    job. 0 fails it at the first."""

    def peak_learning_rate(self, role: ModelRole) -> float:
        """Return the peak learning rate of a trained role."""
        return self.critic_learning_rate if role.kind is ModelKind.VALUE else self.learning_rate


class Training(GroupFields):
    """Ranks that train actor and critic."""

    backend: Literal["torch", "megatron"] = "torch"
    """Training backend."""
    parallelism: TrainingParallelism = Field(default_factory=TrainingParallelism)
    """How models are split; ranks = pipeline x data."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Pipeline schedule."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples a micro-batch; miniBatchSize must be a multiple of microBatchSize x parallelism.data."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer and learning rates."""
    precision: Literal["Auto", "Float32", "BFloat16"] = "Auto"
    """Type of matrix products in generation, scoring and training alike. Auto is BFloat16 when training ranks have GPUs
    (their master weights stay float32), else Float32; say Float32 where the GPUs are older than Ampere."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""

    @property
    def ranks(self) -> int:
        """Training processes."""
        return self.parallelism.pipeline * self.parallelism.data
