"""`spec.fusion`, `spec.checkpoints`, `spec.runPolicy`: mechanisms that can be turned off, and the life of a job."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.failure import FailurePolicy


class InterStageFusion(ApiModel):
    """Migration of the long tail of generation, so that freed workers score (RLHFuse, inter-stage)."""

    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    """Auto fuses when the simulation predicts a gain, with the threshold and pool that it predicts to be best. Fixed
    goes by `threshold` and `pool`."""
    threshold: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """Fixed: unfinished samples at which the tail gathers on the pool (R_t)."""
    pool: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Fixed: generation workers that keep the tail (m); as many as there are, or more, fuses nothing."""
    transfer: Literal["Auto", "KV", "Tokens"] = "Auto"
    """What moves with a sample: its KV cache, or its tokens alone, from which the destination builds the cache anew.
    Auto takes the one that is predicted to be faster, sample by sample."""
    balance: Literal["Disabled", "Auto"] = "Auto"
    """Auto also moves samples before the threshold, from the fullest worker to one that would run dry, when that is
    predicted to gain more than it costs."""


class IntraStageFusion(ApiModel):
    """Actor and critic train at the same time in opposite pipelines (RLHFuse, intra-stage)."""

    mode: Literal["Disabled", "Fused", "FusedSplit", "Auto"] = "Auto"
    """Disabled trains the actor, then the critic. FusedSplit also splits the backward pass. Auto measures and takes the
    fastest."""


class Fusion(ApiModel):
    """Both fusions of RLHFuse."""

    inter_stage: InterStageFusion = Field(default_factory=InterStageFusion)
    """Generation with inference."""
    intra_stage: IntraStageFusion = Field(default_factory=IntraStageFusion)
    """Actor with critic training."""


class Checkpoints(ApiModel):
    """Where and when the state of training is saved; a job resumes exactly from one."""

    path: Location
    """Folder, relative to the manifest; shared by the coordinator and the training workers."""
    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between checkpoints; the last iteration always makes one."""
    keep: Annotated[int, Field(ge=1, le=1000000)] = 3
    """Newest checkpoints kept."""
    on_deletion: Literal["Disabled", "Save"] = "Disabled"
    """Save: deleting a job that runs waits for a last checkpoint, held by the finalizer rlhf.dev/checkpoint."""
    deletion_deadline_seconds: Annotated[int, Field(ge=1, le=300)] = 300
    """Time that checkpoint may take; then the deletion goes on without it."""


class RunPolicy(ApiModel):
    """How long a job may try."""

    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts after failures before the job fails; disruptions and what failurePolicy ignores do not count."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """What the end of a pod means; of pods alone, `rlhf run` does not read it."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Time the job may run."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Time after which a finished job is deleted."""
    worker_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 30
    """Silence after which a worker counts as lost."""
    start_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """Time workers may take to load their models and, once the containers of a job run, to register. Time without a
    node does not count."""
    pod_start_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 1800
    """Time a pod that has a node may be kept from starting (image, volume, init container). Then its GPUs are given
    back: those of the whole job when an iteration needs it, which tries again later. 0: never; of pods alone."""
    force_coordinator_after_seconds: Annotated[int, Field(ge=60, le=86400)] | None = None
    """Time after its grace for which the coordinator's pod is left in deletion on a node that does not answer; then it
    is deleted by force and made again on another. Only where its journal has a lock that other nodes see; unset: never.
    """
    hang_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """Time a process may leave the question whether it lives without an answer; then it is killed and started again, as
    a failure. Long computations and loads answer; 0 never asks. Pods that exist keep what they were made with."""
