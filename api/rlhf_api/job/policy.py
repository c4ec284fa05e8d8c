"""`spec.fusion`, `spec.checkpoints` and `spec.runPolicy`: mechanisms that can be disabled, and the lifecycle of a
job."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.failure import FailurePolicy


class InterStageFusion(ApiModel):
    """Inter-stage fusion of RLHFuse: the long tail of generation migrates to few workers, so that the others score."""

    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    """Disabled never migrates the tail. Auto does where simulation predicts a gain, with the threshold and pool that
    are predicted best. Fixed uses `threshold` and `pool`."""
    threshold: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """With mode Fixed: number of unfinished samples at which the tail is consolidated on the pool (R_t)."""
    pool: Annotated[int, Field(ge=1, le=4096)] | None = None
    """With mode Fixed: number of generation workers that keep the tail (m). All of them, or more, disables fusion."""
    transfer: Literal["Auto", "KV", "Tokens"] = "Auto"
    """What moves with a sample: KV, its KV cache; Tokens, its tokens alone, from which the destination computes the
    cache again. Auto takes for each sample what is predicted to be faster."""
    balance: Literal["Disabled", "Auto"] = "Auto"
    """Auto also moves samples before the threshold, from the fullest worker to one that would run out of work, when
    that is predicted to gain more than it costs."""


class IntraStageFusion(ApiModel):
    """Intra-stage fusion of RLHFuse: actor and critic train at the same time in pipelines of opposite directions."""

    mode: Literal["Disabled", "Fused", "FusedSplit", "Auto"] = "Auto"
    """Disabled trains the actor, then the critic. Fused trains both at once; FusedSplit also splits the backward pass.
    Auto measures all three and takes the fastest."""


class Fusion(ApiModel):
    """The two fusions of RLHFuse."""

    inter_stage: InterStageFusion = Field(default_factory=InterStageFusion)
    """Fusion of generation and inference."""
    intra_stage: IntraStageFusion = Field(default_factory=IntraStageFusion)
    """Fusion of actor and critic training."""


class Checkpoints(ApiModel):
    """Where and when the state of training is saved. A job that resumes from a checkpoint continues exactly."""

    path: Location
    """Folder of the checkpoints, relative to the manifest. The coordinator and all training ranks need it."""
    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between two checkpoints. The last iteration always makes one."""
    keep: Annotated[int, Field(ge=1, le=1000000)] = 3
    """Number of newest checkpoints that are kept."""
    dtype: Literal["Model", "Float32"] = "Model"
    """Type of saved weights. Model: that of the model's config.json. Training resumes from float32 either way."""
    on_deletion: Literal["Disabled", "Save"] = "Disabled"
    """Save makes a last checkpoint when a running job is deleted; until then the finalizer rlhf.dev/checkpoint holds
    it. Disabled deletes it at once."""
    deletion_deadline_seconds: Annotated[int, Field(ge=1, le=300)] = 300
    """Seconds that the last checkpoint may take; then the job is deleted without it."""

    def due(self, version: int) -> bool:
        """Return whether a weight version is saved, wherever the job ends."""
        return version % self.every == 0


class RunPolicy(ApiModel):
    """Restarts, deadlines and deletion of the job."""

    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts after failures before the job fails; disruptions and what failurePolicy ignores do not count."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """What the end of a pod means. Has no effect with `rlhf run`, which makes no pods."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Seconds that the job may run, counted from its start and again from its resumption; then it fails. Unset: no
    limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Seconds after its end at which a finished job is deleted. Unset: never."""
    worker_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 30
    """Seconds without a message from a worker after which it counts as lost."""
    start_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """Seconds that workers may take to register once their containers run, and to load their models. Time without a
    node does not count."""
    pod_start_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 1800
    """Seconds that a pod on a node may wait for an image, a volume or an init container. Then its GPUs are given back,
    or those of the whole job when an iteration needs the pod, and the job tries again later. 0: never. Has no effect
    with `rlhf run`."""
    force_coordinator_after_seconds: Annotated[int, Field(ge=60, le=86400)] | None = None
    """Seconds after its grace period for which a coordinator's pod may stay in deletion on a node that does not answer.
    Then another node gets it by force, but only where nodes see the lock of its journal.
    Unset: never."""
    hang_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """Seconds for which a process may leave liveness probes unanswered, a generation worker a decode step unfinished,
    or training ranks that trained before stand still (60 at most, or 10 times what they ever took); then it is
    restarted, which counts as a failure. 0: no limit. A change
    applies to new pods only."""
