"""`spec.fusion`, `spec.checkpoints` and `spec.runPolicy`: optional mechanisms and the job's lifecycle."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.failure import FailurePolicy


class InterStageFusion(ApiModel):
    """Inter-stage fusion of RLHFuse: the long tail of generation migrates to a few workers, so that the others can
    score."""

    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    """Disabled never migrates the tail. Auto migrates if simulation predicts a gain, with the best predicted threshold
    and pool. Fixed uses `threshold` and `pool`."""
    threshold: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """With mode Fixed: number of unfinished samples at which the tail moves to the pool (R_t)."""
    pool: Annotated[int, Field(ge=1, le=4096)] | None = None
    """With mode Fixed: number of generation workers in the pool (m). All workers, or more, disables fusion."""
    transfer: Literal["Auto", "KV", "Tokens"] = "Auto"
    """Data that moves with a sample: KV, its KV cache; Tokens, only its tokens, from which the destination recomputes
    the cache. Auto chooses the faster by prediction for each sample."""
    balance: Literal["Disabled", "Auto"] = "Auto"
    """Auto also moves samples before the threshold, from a worker that would end late to one that would end early, if
    the predicted gain exceeds the cost."""


class IntraStageFusion(ApiModel):
    """Intra-stage fusion of RLHFuse: actor and critic train at once in pipelines of opposite directions."""

    mode: Literal["Disabled", "Fused", "FusedSplit", "Auto"] = "Auto"
    """Disabled trains the actor, then the critic. Fused trains both at once; FusedSplit also splits the backward pass.
    Auto measures Disabled and the modes that are predicted to be faster, and uses the fastest."""


class Fusion(ApiModel):
    """The two fusions of RLHFuse."""

    inter_stage: InterStageFusion = Field(default_factory=InterStageFusion)
    """Fusion of generation and inference."""
    intra_stage: IntraStageFusion = Field(default_factory=IntraStageFusion)
    """Fusion of actor and critic training."""


class Checkpoints(ApiModel):
    """Where and when training state is saved. A job can resume from a checkpoint."""

    path: Location
    """Folder of the checkpoints, relative to the manifest. The coordinator and all training ranks need it."""
    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between checkpoints. The last iteration always saves one."""
    keep: Annotated[int, Field(ge=1, le=1000000)] = 3
    """Number of newest checkpoints to keep; the one with the best evaluation also stays."""
    dtype: Literal["Model", "Float32"] = "Model"
    """Number type of saved weights. Model: that of the model's config.json. Training always resumes from float32."""
    on_deletion: Literal["Disabled", "Save"] = "Disabled"
    """Save writes a last checkpoint when a running job is deleted; the finalizer rlhf.dev/checkpoint delays deletion
    until then. Disabled deletes at once."""
    deletion_deadline_seconds: Annotated[int, Field(ge=1, le=300)] = 300
    """Seconds allowed for the last checkpoint; then the job is deleted without it."""

    def due(self, version: int) -> bool:
        """Return whether to save a weight version, regardless of where the job ends."""
        return version % self.every == 0


class RunPolicy(ApiModel):
    """Restarts, deadlines and deletion of the job."""

    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts after failures before the job fails. Disruptions and ends that failurePolicy ignores do not count."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """Reaction to the end of a pod. No effect with `rlhf run`, which has no pods."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Seconds that the job may run, from its start and again from each resumption; then it fails. Unset: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Seconds after its end until a finished job is deleted. Unset: never."""
    worker_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 30
    """Seconds without a message after which a worker counts as lost."""
    start_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """Seconds allowed for workers to register once their containers run, and to load models. Time without a node does
    not count."""
    pod_start_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 1800
    """Seconds that a pod on a node may wait for an image, a volume or a failing init container. Then its GPUs are
    released, or the whole job's if an iteration needs the pod, and the job tries again later. 0: no limit. No effect
    with `rlhf run`."""
    force_coordinator_after_seconds: Annotated[int, Field(ge=60, le=86400)] | None = None
    """Seconds after the grace period before a coordinator pod in deletion on an unresponsive node is force-deleted and
    replaced on another node. This needs a journal lock that other nodes see. Unset: never."""
    hang_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """Seconds after which a process counts as hung: it does not answer liveness probes, a decode step does not end, or
    training ranks make no progress (for them at most 60, but at least 10 times their longest gap so far, up to
    startTimeoutSeconds). A restart follows, which counts as a failure. 0: no limit. Changes apply to new pods."""
