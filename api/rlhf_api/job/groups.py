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
"""A learning rate.

The bound is exclusive: the API server compares an integer, such as 0, with the integer part of a bound.
"""
AHEAD: Final = "Ahead"
"""Name of the drafter that guesses from what idle workers decoded ahead for the same sample."""
DRAFTERS: Final[tuple[Literal["Siblings", "Ngram", "Model"], ...]] = ("Siblings", "Ngram")
"""Default drafters, which need nothing outside the job."""


class GroupFields(ApiModel):
    """Fields that every group of workers has."""

    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per worker process; 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the compute library per worker process. Results may depend on it."""
    template: dict[str, Any] = Field(default_factory=dict)
    """PodTemplateSpec of the group's pods: image, volumes, node selectors, resources. The operator's own settings take
    precedence."""


class CoordinatorFields(ApiModel):
    """The process that schedules the job's work and passes samples between workers: one pod without GPUs."""

    template: dict[str, Any] = Field(default_factory=dict)
    """PodTemplateSpec of the coordinator's pod: node selectors, resources, init containers. The operator's own settings
    take precedence. Volumes, mounts and pull secrets of the pods that train are added."""


class TensorParallelism(ApiModel):
    """How one generation worker splits the model."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel degree: GPUs over which vLLM splits each layer within a worker, or CPU processes with
    gpusPerReplica 0. A power of two that divides the policy's attention heads."""


class DraftModel(ApiModel):
    """A small model that drafts for the policy."""

    path: Location
    """Hugging Face folder of a causal language model with the policy's tokenizer."""
    train: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled trains it on the training ranks to imitate the policy and publishes both together."""
    learning_rate: Rate = 1e-4
    """Constant learning rate of the draft model. Other AdamW settings are those of spec.training.optimizer."""


class Speculation(ApiModel):
    """Speculative decoding in generation: several draft tokens are verified in one pass. A draft token is accepted only
    if it equals the sampled token, so results change at most by rounding."""

    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    """Disabled decodes one token at a time. Auto picks the draft length, possibly 0, that measured fastest. Fixed
    drafts maxTokens tokens wherever a drafter has them."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Most draft tokens per sample and pass, in addition to the token that every pass samples."""
    drafters: Annotated[list[Literal["Siblings", "Ngram", "Model"]], Field(min_length=1, max_length=3)] = Field(
        default_factory=lambda: list(DRAFTERS)
    )
    """Draft sources: Siblings uses other responses to the prompt, also from earlier iterations; Ngram uses the sample
    itself; Model uses draftModel. The drafter with the longest expected acceptance drafts each sample."""
    draft_model: DraftModel | None = None
    """The model of the drafter Model."""
    ahead: Literal["Disabled", "Auto"] = "Disabled"
    """Auto lets idle generation workers draft samples of the next iteration under their own random keys, while such
    drafts prove right often enough. Workers with another engine than torch do not. Needs placement Dedicated and the
    drafter Siblings."""

    @property
    def loaded_drafters(self) -> tuple[str, ...]:
        """Names of all drafters of a worker: those of the manifest, and the one for drafts ahead."""
        return (*self.drafters, *((AHEAD,) if self.ahead != "Disabled" else ()))


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
    """Engine that decodes: torch, vllm, or the path of your own module, with a dot, in the worker image. Auto is torch
    with an environment. Else it follows parallelism and engineArgs. Without them it is vllm on a GPU if the image's
    vLLM serves the model, except in a deterministic job, and else torch."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments under the engine's own names, passed unchanged."""
    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most samples that a worker decodes at a time."""
    parallelism: TensorParallelism = Field(default_factory=TensorParallelism)
    """How one worker splits the model."""
    speculation: Speculation = Field(default_factory=Speculation)
    """Speculative decoding."""


class Inference(GroupFields):
    """Workers that score samples: reference log-probabilities, critic values, rewards."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of workers that only score. With 0, generation workers with nothing to decode do all scoring."""
    overlap: Literal["Disabled", "Enabled"] = "Enabled"
    """Enabled scores each finished sample while others still decode. Disabled scores after the whole batch is
    generated."""
    incremental: Literal["Disabled", "Auto", "Enabled"] = "Auto"
    """Lets idle workers score the known part of unfinished responses with reference and critic, so that only the rest
    remains. Auto does so if simulation predicts a gain. Needs overlap Enabled."""
    batch_tokens: Annotated[int, Field(ge=1, le=16777216)] = 16384
    """Most tokens per forward pass of scoring; a longer sample has its own pass. Deterministic jobs ignore it and score
    one sample at a time."""


class TrainingParallelism(ApiModel):
    """How training ranks split a model: pipeline x data x context x tensor ranks."""

    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of pipeline stages."""
    data: Annotated[int, Field(ge=1, le=4096)] = 1
    """Data parallel degree: number of groups of ranks that train on different samples."""
    context: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks that split each sample by position."""
    shard: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks that split one copy (FSDP2). Above 1 it is data x context, with pipeline 1 and
    backend torch."""
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that split every layer of a stage: a power of two that divides the models' heads, with backend megatron."""
    expert: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks, out of data x context, that divide each layer's experts."""
    critic_tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor size of critics, which have pipeline x tensor / criticTensor stages. Unset: tensor."""
    sequence_parallel: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled splits activations between layers by position over the tensor ranks to save memory."""
    shard_optimizer: bool = False
    """True splits AdamW's moments over copies of a stage (ZeRO 1): same bits, less memory."""
    offload_optimizer: bool = False
    """True keeps AdamW's moments in host memory: the same bits, slower steps."""

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def keepers(self) -> int:
        """Number of leading ranks that together hold every parameter, and so publish and save it."""
        return self.pipeline * self.shard * self.tensor * self.expert

    def tensor_field(self, role: ModelRole) -> str:
        """Return the name of the field with the number of ranks that split the layers of a trained role."""
        return "criticTensor" if self.critic_tensor is not None and role.kind is ModelKind.VALUE else "tensor"

    def tensor_of(self, role: ModelRole) -> int:
        """Return the number of ranks that split the layers of a trained role."""
        return self.critic_tensor or self.tensor if role.kind is ModelKind.VALUE else self.tensor

    def stages_of(self, role: ModelRole) -> int:
        """Return the number of pipeline stages of a trained role."""
        return self.pipeline * self.tensor // self.tensor_of(role)

    @property
    def writers(self) -> int:
        """Number of leading ranks that have something to save."""
        return self.ranks if self.shard_optimizer else self.keepers


class Schedule(ApiModel):
    """The pipeline schedule of one model's training."""

    mode: Literal["Auto", "OneFOneB"] = "Auto"
    """Auto lets fusion.intraStage choose. OneFOneB is serial 1F1B, one model after the other."""


class Optimizer(ApiModel):
    """AdamW and its learning-rate schedule."""

    learning_rate: Rate = 1e-6
    """Peak learning rate of the models that the algorithm trains, except critics."""
    critic_learning_rate: Rate = 9e-6
    """Peak learning rate of critics."""
    schedule: Literal["Constant", "Linear", "Cosine"] = "Constant"
    """Shape of the learning rate after warm-up, over all steps of the job. If iterations changes in a live job, the
    rest of the curve stretches or shrinks without a jump."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final share of the peak learning rate with Linear and Cosine."""
    warmup_steps: Annotated[int, Field(ge=0, le=2147483647)] = 0
    """Steps over which the learning rate rises linearly to its peak."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment per step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment per step."""
    epsilon: Annotated[float, Field(gt=1e-16, le=1)] = 1e-8
    """Term that AdamW adds to its denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    max_gradient_norm: PositiveOrOff = 1.0
    """Largest gradient norm of a model, over all stages; larger gradients are scaled down. 0: no clipping."""
    max_non_finite_steps: Annotated[int, Field(ge=0, le=1000000)] = 5
    """Consecutive steps that may have an infinite or NaN loss or gradient. Each is skipped and counted; one more fails
    the job. 0: the first fails it."""

    def peak_learning_rate(self, role: ModelRole) -> float:
        """Return the peak learning rate of a trained role."""
        return self.critic_learning_rate if role.kind is ModelKind.VALUE else self.learning_rate


class Training(GroupFields):
    """Ranks that train the models of the job."""

    backend: Literal["torch", "megatron"] = "torch"
    """Layers to train: torch uses transformers; megatron uses Megatron-core, which supports Llama, Mistral, Mixtral,
    Qwen2, Qwen3 and Qwen3-MoE without adapters."""
    parallelism: TrainingParallelism = Field(default_factory=TrainingParallelism)
    """How the pipeline x data x context x tensor ranks split models."""
    ranks_per_pod: Annotated[int, Field(ge=1, le=64)] = 1
    """Training ranks per pod, each a process with gpusPerReplica GPUs; divides the number of ranks."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Pipeline schedule of one model."""
    critic_overlap: Literal["Disabled", "Enabled", "Auto"] = "Disabled"
    """Enabled trains critics while the next batch decodes; Auto does so if it measures a gain."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples per micro-batch. The algorithm's miniBatchSize must be a multiple of microBatchSize x
    parallelism.data."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    """Most tokens in a micro-batch, with padding: long samples cause more micro-batches of fewer samples. A longer
    sample raises the limit to its length. Unset: microBatchSize is the only limit."""
    packing: bool = False
    """Concatenate samples of a micro-batch; do not pad."""
    shared_prompts: Literal["Disabled", "Auto", "Enabled"] = "Disabled"
    """Enabled computes a prompt once for its responses in a micro-batch; Auto does so if this saves a
    predicted factor of 1.1 in operations. Needs packing."""
    stream: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled computes the gradients of finished, scored prompt groups while others decode; the step of the iteration
    waits for the whole batch. For algorithms with advantages by group and one step per iteration."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer and learning rates."""
    lora: Lora | None = None
    """Trains low-rank adapters on frozen models; they need a learning rate about ten times larger. Unset: all weights
    are trained."""
    precision: Literal["Auto", "Float32", "BFloat16"] = "Auto"
    """Number type of matrix products in generation, scoring and training. Auto is BFloat16 if training ranks have GPUs
    (master weights stay float32), else Float32. GPUs older than Ampere need Float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    weight_sharing: Mode = "Auto"
    """How new weights reach workers on a training rank's machine. Auto shares GPU or host memory between the processes,
    and streams if that fails. Disabled always streams."""

    profile: Mode = "Disabled"
    """Auto measures costs for `rlhf plan` before the first step."""

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.parallelism.ranks

    def adapters(self, role: ModelRole) -> Lora | None:
        """Return the adapters that train a role; None if all its weights are trained."""
        return (
            None
            if self.lora is not None and self.lora.models == "Policy" and role.kind is ModelKind.VALUE
            else self.lora
        )
