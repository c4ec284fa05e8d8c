"""`spec.generation`, `spec.inference` and `spec.training`, the three groups of worker processes; `spec.coordinator`."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.api_model import PYTHON_NAME, ApiModel, Location, PositiveOrOff
from rlhf_api.job.lora import Lora

Mode = Literal["Disabled", "Auto"]
ComputeType = Literal["Float32", "BFloat16"]
"""Number type of matrix products."""
Rate = Annotated[float, Field(gt=1e-12, le=1)]
"""A learning rate. A smaller one changes no float32 weight; with a larger one AdamW takes steps of that size, whatever
the gradient. The lower bound is exclusive because the API server compares a whole number, such as 0, with the whole
part of a bound."""
DRAFTERS: Final[tuple[Literal["Siblings", "Ngram", "Model"], ...]] = ("Siblings", "Ngram")
"""Drafters unless the manifest names others: those that need nothing but the job itself."""


class GroupFields(ApiModel):
    """Fields that every group of workers has."""

    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per worker process; 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the compute library per worker process. Results may depend on it."""
    template: dict[str, Any] = Field(default_factory=dict)
    """PodTemplateSpec of the group's pods: image, volumes, node selectors, resources. What the operator itself sets in
    a pod wins over it."""


class CoordinatorFields(ApiModel):
    """The process that schedules the job's work and passes samples between workers: one pod without GPUs."""

    template: dict[str, Any] = Field(default_factory=dict)
    """PodTemplateSpec of the coordinator's pod: node selectors, resources, init containers. What the operator itself
    sets in a pod wins over it. It has the volumes, mounts and pull secrets of training pods."""


class TensorParallelism(ApiModel):
    """How the model is split within one generation worker."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel degree: GPUs of one worker over which each layer is split, by vLLM. A power of two, the same as
    gpusPerReplica; with gpusPerReplica 0, processes on CPU. The policy's attention heads are a multiple of it."""


class DraftModel(ApiModel):
    """A small model that drafts for the policy."""

    path: Location
    """Hugging Face folder of a causal language model with the policy's tokenizer."""
    train: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled trains it, on the training ranks, to say what the policy says, and publishes it with the
    policy's weights."""
    learning_rate: Rate = 1e-4
    """Learning rate of its training, the same at every step. The other
    numbers of AdamW are those of spec.training.optimizer."""


class Speculation(ApiModel):
    """Speculative decoding in generation: tokens are drafted, and several are verified in one pass. A draft is kept
    where it equals the token that is drawn without it, so it changes no token."""

    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    """Disabled decodes token by token. Auto drafts as far as was measured to be faster, also not at all. Fixed drafts
    maxTokens tokens wherever a drafter has as many."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Longest draft: tokens of one sample that are verified in one pass, beside the one that is drawn in any case."""
    drafters: Annotated[list[Literal["Siblings", "Ngram", "Model"]], Field(min_length=1, max_length=3)] = Field(
        default_factory=lambda: list(DRAFTERS)
    )
    """Who drafts: Siblings from other responses to the same prompt, of this iteration and earlier ones, Ngram from the
    sample itself, Model by draftModel. Of several, the one expected to be right the furthest drafts for a sample."""
    draft_model: DraftModel | None = None
    """The model of the drafter Model."""


class Generation(GroupFields):
    """Workers that decode responses."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of workers; the scale subresource writes this field."""
    engine: Annotated[
        str,
        Field(
            max_length=253,
            pattern=rf"^(Auto|torch|vllm|{PYTHON_NAME}(\.{PYTHON_NAME})+)$",
            examples=["Auto", "my_package.my_engine"],
        ),
    ] = "Auto"
    """Engine that decodes: torch, vllm, or the path of a module of your own in the worker image, with a dot in it. Auto
    is vllm where the worker has a GPU and an image with vLLM that serves the model; else, and in a deterministic job,
    torch."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine under its own names, passed on unchanged."""
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most samples that one worker decodes at a time."""
    parallelism: TensorParallelism = Field(default_factory=TensorParallelism)
    """How the model is split within one worker."""
    speculation: Speculation = Field(default_factory=Speculation)
    """Speculative decoding."""


class Inference(GroupFields):
    """Workers that score samples: reference log-probabilities, critic values, rewards."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of workers that only score; 0 leaves all scoring to generation workers that have nothing to decode."""
    overlap: Literal["Disabled", "Enabled"] = "Enabled"
    """Enabled scores each sample when it is finished, while others are still decoded. Disabled scores when the whole
    batch is generated."""
    incremental: Literal["Disabled", "Auto", "Enabled"] = "Auto"
    """Idle workers score the known part of responses that are still decoded, by reference and
    critic, so that only the rest is left at their end. Auto does so where simulation predicts a gain. Has an effect
    with overlap Enabled only."""
    batch_tokens: Annotated[int, Field(ge=1, le=16777216)] = 16384
    """Most tokens scored in one forward pass. Ignored in a deterministic job, which scores sample by
    sample."""


class TrainingParallelism(ApiModel):
    """How a model is split over the training ranks, which are pipeline x data x context x tensor."""

    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of pipeline stages."""
    data: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of data parallel copies."""
    context: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks that share each sample of a copy by position."""
    shard: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks that split one copy (FSDP2). Above 1 it is data x context, with pipeline 1 and
    backend torch."""
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that split every layer of a stage: a power of two that divides the models' heads, with backend megatron."""
    expert: Annotated[int, Field(ge=1, le=4096)] = 1
    """Data parallel ranks that share out each layer's experts."""
    critic_tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """As tensor, of critics, which then have pipeline x tensor / criticTensor stages. Unset: tensor."""
    sequence_parallel: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled divides states between layers by position over the tensor ranks, for less memory."""
    shard_optimizer: bool = False
    """True shares AdamW's moments out over copies of a stage (ZeRO 1): the same bits, less memory."""
    offload_optimizer: bool = False
    """True keeps AdamW's moments in host memory: the same bits, slower steps."""

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def keepers(self) -> int:
        """Number of first ranks that hold every parameter among them, and so publish and save it."""
        return self.pipeline * self.shard * self.tensor * self.expert

    def tensor_field(self, role: ModelRole) -> str:
        """Return the name of the field that says over how many ranks the layers of a trained role are split."""
        return "criticTensor" if self.critic_tensor is not None and role.kind is ModelKind.VALUE else "tensor"

    def tensor_of(self, role: ModelRole) -> int:
        """Return over how many ranks the layers of a trained role are split."""
        return self.critic_tensor or self.tensor if role.kind is ModelKind.VALUE else self.tensor

    def stages_of(self, role: ModelRole) -> int:
        """Return how many pipeline stages a trained role has."""
        return self.pipeline * self.tensor // self.tensor_of(role)

    @property
    def writers(self) -> int:
        """Number of first ranks that have something to save."""
        return self.ranks if self.shard_optimizer else self.keepers


class Schedule(ApiModel):
    """The pipeline schedule of one model's training."""

    mode: Literal["Auto", "OneFOneB"] = "Auto"
    """Auto leaves the choice to fusion.intraStage. OneFOneB is serial 1F1B, model after model."""


class Optimizer(ApiModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: Rate = 1e-6
    """Peak learning rate of the actor."""
    critic_learning_rate: Rate = 9e-6
    """Peak learning rate of the critic; larger, as a value head starts untrained."""
    schedule: Literal["Constant", "Linear", "Cosine"] = "Constant"
    """Course of the learning rate after warm-up, over all steps of the job. When the iterations of a live job change,
    the rest of it is stretched or compressed without a jump."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak learning rate that Linear and Cosine fall to."""
    warmup_steps: Annotated[int, Field(ge=0, le=2147483647)] = 0
    """Steps in which the learning rate rises linearly from 0 to its peak."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment, a step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment, a step."""
    epsilon: Annotated[float, Field(gt=1e-16, le=1)] = 1e-8
    """Term that AdamW adds to its denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    max_gradient_norm: PositiveOrOff = 1.0
    """Largest gradient norm of a model, over all stages; larger gradients are scaled down to it. 0: no clipping."""
    max_non_finite_steps: Annotated[int, Field(ge=0, le=1000000)] = 5
    """Steps in a row whose gradient may be infinite or NaN: each is skipped and counted, and one more fails the job.
    0 fails it at the first."""

    def peak_learning_rate(self, role: ModelRole) -> float:
        """Return the peak learning rate of a trained role."""
        return self.critic_learning_rate if role.kind is ModelKind.VALUE else self.learning_rate


class Training(GroupFields):
    """Ranks that train the actor and, where the algorithm has one, the critic."""

    backend: Literal["torch", "megatron"] = "torch"
    """Whose layers are trained: torch those of transformers, megatron those of Megatron-core, which has Llama, Mistral,
    Mixtral, Qwen2, Qwen3, Qwen3-MoE, without adapters."""
    parallelism: TrainingParallelism = Field(default_factory=TrainingParallelism)
    """How models are split over the ranks, which are pipeline x data x context x tensor."""
    ranks_per_pod: Annotated[int, Field(ge=1, le=64)] = 1
    """Training ranks in one pod, each a process with gpusPerReplica GPUs; divides the number of ranks."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Pipeline schedule of one model."""
    critic_overlap: Literal["Disabled", "Enabled", "Auto"] = "Disabled"
    """Enabled trains critics while the next batch is decoded; Auto where measured to be faster."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples per micro-batch. The algorithm's miniBatchSize must be a multiple of microBatchSize x
    parallelism.data."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    """Most tokens of a micro-batch, padding included: where lengths ask for it a mini-batch has more micro-batches, of
    fewer samples. A longer sample raises the bound to itself. Unset: microBatchSize alone bounds."""
    packing: bool = False
    """Lay samples of a micro-batch end to end, not padded."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer and learning rates."""
    lora: Lora | None = None
    """Trains low-rank adapters over frozen models. Unset: all weights are trained. They want a learning rate
    about ten times as large."""
    precision: Literal["Auto", "Float32", "BFloat16"] = "Auto"
    """Number type of matrix products in generation, scoring and training. Auto is BFloat16 when training ranks
    have GPUs (their master weights stay float32), else Float32. Set Float32 where the GPUs are older than Ampere."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    weight_sharing: Mode = "Auto"
    """How new weights reach workers on the machine of a training rank. Auto hands them over in memory that both
    processes use, of their GPU or the host, and streams where that does not work. Disabled always streams."""

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.parallelism.ranks

    def adapters(self, role: ModelRole) -> Lora | None:
        """Return the adapters by which a role is trained; None where all its weights are."""
        return (
            None
            if self.lora is not None and self.lora.models == "Policy" and role.kind is ModelKind.VALUE
            else self.lora
        )
