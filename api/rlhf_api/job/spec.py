"""RLHFJob: the manifest that a user writes. Rules across fields are in `rlhf_api.rules` with their CEL text."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_api.algorithms.combination import Combination
from rlhf_api.algorithms.graph import Scope
from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.api_model import ApiModel
from rlhf_api.job.algorithm import Algorithm
from rlhf_api.job.devices import Devices
from rlhf_api.job.evaluation import Evaluation
from rlhf_api.job.groups import ComputeType, CoordinatorFields, Generation, Inference, Training
from rlhf_api.job.models import Models
from rlhf_api.job.policy import Checkpoints, Fusion, RunPolicy
from rlhf_api.job.reward_headers import SecretKey, secret_variables
from rlhf_api.job.reward_shaping import RewardShaping
from rlhf_api.job.rollout import Prompts, Rollout
from rlhf_api.job.samples import SampleSelection
from rlhf_api.job.scheduling import OURS, ManagedBy, OperatorClass, Scheduling
from rlhf_api.job.status import RLHFJobStatus
from rlhf_api.job.trackers import Trackers
from rlhf_common.names import Group
from rlhf_common.samples import FIRST_EVALUATION_SAMPLE


class RLHFJobSpec(ApiModel):
    """The models, data and workers of the training run."""

    algorithm: Algorithm
    """The algorithm of the job: exactly one member."""
    iterations: Annotated[int, Field(ge=1, le=10000000)] = 100
    """Number of iterations, each of which trains on one batch."""
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Seed of sampling, of the order of prompts and samples, and of new adapters; below 2^53, so that JSON readers keep
    it exact."""
    deterministic: bool = False
    """Whether results are independent of batching, placement, timing and faults (bitwise on CPU), at some cost in
    speed."""
    placement: Literal["Dedicated", "Colocated"] = "Dedicated"
    """Dedicated: training ranks have their own pods. Colocated: rank r runs in the process of generation worker r; they
    take turns on its device."""
    devices: Devices | None = None
    """Chooses placement and group sizes for a number of devices. Unset: the manifest's own sizes apply."""
    suspend: bool = False
    """True stops all workers until it is false again, after a checkpoint if checkpoints is set."""
    models: Models
    """Source of each model role."""
    reward_shaping: RewardShaping = Field(default_factory=RewardShaping)
    """Changes to rewards before advantages are computed."""
    prompts: Prompts
    """The prompts of the policy."""
    rollout: Rollout = Field(default_factory=Rollout)
    """Sampling of responses."""
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
    """Where and when checkpoints are saved. Unset: there is only the journal."""
    samples: SampleSelection = Field(default_factory=SampleSelection)
    """Tables of samples for people to read."""
    evaluation: Evaluation | None = None
    """Evaluation during training. Unset: none."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """Restarts, deadlines and deletion of the job."""
    scheduling: Scheduling = Field(default_factory=Scheduling)
    """Gang scheduling, queues and priority."""
    metrics: Literal["Enabled", "Disabled"] = "Enabled"
    """Enabled serves metrics of the job's processes to Prometheus, and writes facts.jsonl and sample-histories.jsonl.
    Disabled does neither; metrics.jsonl remains."""
    trackers: Trackers = Field(default_factory=Trackers)
    """Services that receive metrics or traces of every iteration, besides the run folder's files."""
    managed_by: ManagedBy = OURS
    """Who reconciles the job: this operator, or Kueue's MultiKueue, which runs it in another cluster."""
    operator_class: OperatorClass | None = None
    """The operator to reconcile the job if a cluster has several: the one started with this --operator-class. Unset:
    the one started without."""

    @property
    def awaits_plan(self) -> bool:
        """Whether sizes are not chosen yet, so that the job can have no workers."""
        return self.devices is not None and bool(self.devices.chosen)

    @property
    def replays_tokens(self) -> bool:
        """Whether workers decode a resumed sample's tokens again, as the torch engine does in a deterministic job."""
        by_vllm = self.generation.engine == "vllm" or self.generation.parallelism.tensor > 1
        return self.deterministic and not by_vllm

    @property
    def rank_group(self) -> Group:
        """Group whose workers hold the training ranks, rank r in worker r."""
        return Group.GENERATION if self.placement == "Colocated" else Group.TRAINING

    def prompts_of(self, sample: int) -> Prompts:
        """Return the prompts that a sample belongs to, by its number in messages."""
        evaluated = self.evaluation.held_out(self.prompts) if self.evaluation is not None else None
        return evaluated if evaluated is not None and sample >= FIRST_EVALUATION_SAMPLE else self.prompts

    def combination(self, role: ModelRole) -> Combination | None:
        """Return the combination of the named rewards of a role that judges; None if it has none with a name."""
        weights = tuple((entry.name, entry.weight) for entry in self.models.rewards_of(role) if entry.name)
        return self.reward_shaping.combination(weights) if weights else None

    def scope(self, role: ModelRole, reward: str) -> Scope:
        """Return the scope of one call of a role's reward: one response, or all responses to a prompt."""
        of_groups = (each.name for each in self.models.rewards_of(role) if each.reward.of_group)
        return Scope.GROUP if reward in of_groups else Scope.SAMPLE

    def secret_variables(self, group: Group) -> dict[SecretKey, str]:
        """Return key of a Secret -> environment variable, for all user code in a group's workers. A Secret has the same
        variable in every group."""
        environment = self.rollout.environment
        turns = environment.secret_keys() if environment and group is Group.GENERATION else ()
        # Workers of both groups score; generation workers also run the environment.
        return {} if group is Group.TRAINING else secret_variables((*self.models.secret_keys(), *turns))

    @property
    def compute_type(self) -> ComputeType:
        """Number type of matrix products of every role: training.precision; if that is Auto, the type that the ranks
        use."""
        if self.training.precision != "Auto":
            return self.training.precision
        ranks = self.generation if self.rank_group is Group.GENERATION else self.training
        return "BFloat16" if ranks.gpus_per_replica else "Float32"


class RLHFJob(ApiModel):
    """One job, for `kubectl apply` or `rlhf run`."""

    api_version: Literal["rlhf.dev/v1alpha1"]
    """Always rlhf.dev/v1alpha1."""
    kind: Literal["RLHFJob"]
    """Always RLHFJob."""
    metadata: dict[str, Any]
    """Kubernetes object metadata, with a name or generateName."""
    spec: RLHFJobSpec
    """The desired training run."""
    status: RLHFJobStatus | None = None
    """Written by the operator."""

    @property
    def name(self) -> str:
        """metadata.name."""
        return str(self.metadata["name"])
