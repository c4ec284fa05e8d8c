"""RLHFJob: the manifest that a user writes. Rules that cross fields are in `rlhf_api.rules`, with their CEL text."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job.algorithm import Algorithm
from rlhf_api.job.groups import ComputeType, CoordinatorFields, Generation, Inference, Training
from rlhf_api.job.models import Models
from rlhf_api.job.policy import Checkpoints, Fusion, RunPolicy
from rlhf_api.job.rollout import Prompts, Rollout
from rlhf_api.job.scheduling import OURS, ManagedBy, OperatorClass, Scheduling
from rlhf_api.job.status import RLHFJobStatus
from rlhf_api.names import Group


class RLHFJobSpec(ApiModel):
    """What is trained, on which data, and by how many workers."""

    algorithm: Algorithm
    """Exactly one member, the algorithm that trains the policy."""
    iterations: Annotated[int, Field(ge=1, le=10000000)] = 100
    """Number of iterations, each of which generates, scores and trains one batch."""
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Seed of every random number of the job. It is below 2^53, which every JSON reader keeps exact."""
    deterministic: bool = False
    """Whether results are independent of batching, placement, timing and faults (bitwise on CPU), at some cost in
    speed."""
    placement: Literal["Dedicated", "Colocated"] = "Dedicated"
    """Dedicated: training ranks have pods of their own. Colocated: rank r runs in the process of generation worker r,
    and both use its device in turn."""
    suspend: bool = False
    """True makes the job save a checkpoint and stop all its workers, until it is false again."""
    models: Models
    """Where each model role comes from."""
    prompts: Prompts
    """The prompts of the policy."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How responses are sampled."""
    generation: Generation = Field(default_factory=Generation)
    """Workers that decode responses."""
    inference: Inference = Field(default_factory=Inference)
    """Workers that score samples."""
    training: Training = Field(default_factory=Training)
    """Ranks that train the models."""
    coordinator: CoordinatorFields = Field(default_factory=CoordinatorFields)
    """The process that schedules the job's work and passes samples between workers."""
    fusion: Fusion = Field(default_factory=Fusion)
    """Fusion of the stages of an iteration."""
    checkpoints: Checkpoints | None = None
    """Where and when checkpoints are saved. Unset: none, only the journal is kept."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """Restarts, deadlines and deletion of the job."""
    scheduling: Scheduling = Field(default_factory=Scheduling)
    """Gang scheduling, queues and priority."""
    managed_by: ManagedBy = OURS
    """Who reconciles the job: this operator, or Kueue's MultiKueue, which runs it in another cluster."""
    operator_class: OperatorClass | None = None
    """The operator that reconciles the job where a cluster has several: the one that was started with this name as
    --operator-class. Unset: the one that was started without."""

    @property
    def rank_group(self) -> Group:
        """Group whose workers hold the training ranks, rank r in worker r."""
        return Group.GENERATION if self.placement == "Colocated" else Group.TRAINING

    @property
    def compute_type(self) -> ComputeType:
        """Number type of matrix products of every role: training.precision, or where that is Auto, what the ranks
        use."""
        if self.training.precision != "Auto":
            return self.training.precision
        ranks = self.generation if self.rank_group is Group.GENERATION else self.training
        return "BFloat16" if ranks.gpus_per_replica else "Float32"


class RLHFJob(ApiModel):
    """One job: `kubectl apply` it, or `rlhf run` it."""

    api_version: Literal["rlhf.dev/v1alpha1"]
    """Always rlhf.dev/v1alpha1."""
    kind: Literal["RLHFJob"]
    """Always RLHFJob."""
    metadata: dict[str, Any]
    """Kubernetes object metadata; name is required."""
    spec: RLHFJobSpec
    """What is trained, and how."""
    status: RLHFJobStatus | None = None
    """Written by the operator."""

    @property
    def name(self) -> str:
        """metadata.name."""
        return str(self.metadata["name"])
