"""`status` of an RLHFJob: the operator's observations.

Readers ignore unknown fields, because a newer operator may have written them.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from rlhf_api.api_model import ApiModel


def _a_time(value: str) -> str:
    """Return a time. Raises ValueError if it is invalid or lacks a time zone: the API server rejects that."""
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError("a time has a zone")
    return value


def _as_stored(value: int) -> int:
    """Return an integer. Raises ValueError if it exceeds the 64 bits that the API server stores."""
    if value >= 2**63:
        raise ValueError("an integer has 64 bits")
    return value


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64), AfterValidator(_a_time)]
"""RFC 3339 with a time zone, such as 2026-08-22T10:00:00Z."""
Text = Annotated[str, Field(max_length=1024)]
Tally = Annotated[int, Field(ge=0), AfterValidator(_as_stored)]


class StatusModel(ApiModel):
    """A part of the status."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One observation, as metav1.Condition of Kubernetes; `rlhf_common.conditions` lists types and reasons."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """The observed condition, such as Running."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Reason, one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Explanation for a user to act on."""
    last_transition_time: Time
    """Time of the last change of status."""
    observed_generation: Tally | None = None
    """metadata.generation of this observation."""


class GroupStatus(StatusModel):
    """The pods of one group."""

    name: Literal["coordinator", "generation", "inference", "training"]
    """Name of the group."""
    desired: Tally
    """Number of pods wanted."""
    ready: Tally
    """Number of ready pods; while the coordinator answers, of its ready workers, at most desired."""
    failed: Tally = 0
    """Number of pods that failed and are not yet replaced."""
    restarts: Tally = 0
    """Number of counted ends of pods or containers so far, without those with exit code 0."""
    out_of_memory: Tally = 0
    """Number of counted ends of containers that were killed for using more memory than their limit."""
    epoch: Tally = 0
    """Number of restarts of the whole group by the failure policy. Pods have it as label rlhf.dev/epoch."""
    updated: Tally = 0
    """Number of active pods that need no replacement for a newer template or a restart of the group."""


class ScaleStatus(StatusModel):
    """Data of the scale subresource, for the generation group."""

    replicas: Tally
    """Number of generation pods that have not ended and are not being deleted."""
    selector: Annotated[str, Field(max_length=512)]
    """Label selector of the generation pods, for autoscalers."""


class ProgressStatus(StatusModel):
    """Progress of the job. While nothing else changes, it is updated at most every ten seconds."""

    iteration: Tally
    """Number of iterations trained."""
    iterations: Tally
    """Number of iterations wanted."""
    summary: Annotated[str, Field(max_length=32)]
    """Both numbers, such as 37/100."""
    stage: Annotated[str, Field(max_length=64)] | None = None
    """Current stage, such as Generating or Training."""
    reward: float | None = None
    """Mean reward of the last iteration."""
    kl: float | None = None
    """Mean KL divergence to the reference in the last iteration, in nats per response; compare klTarget."""
    kl_per_token: float | None = None
    """The same in nats per token."""
    loss: float | None = None
    """Mean loss of the last iteration, for a job without generation and so without reward."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Samples trained per second in the last iteration."""
    non_finite_steps: Tally | None = None
    """Number of optimizer steps skipped so far because a loss or gradient was infinite or NaN."""
    evaluation_reward: float | None = None
    """Mean reward of the last evaluation."""
    evaluation_version: Tally | None = None
    """Weight version of that evaluation."""
    best_evaluation_reward: float | None = None
    """Mean reward of the best evaluation so far."""
    best_evaluation_version: Tally | None = None
    """Weight version of that evaluation."""
    sample_failure: Annotated[str, Field(max_length=1024)] | None = None
    """Last sample of this iteration on which workers failed, the error, and the consequence."""
    tracker_lost: Annotated[str, Field(max_length=1024)] | None = None
    """Last metrics tracker that this coordinator gave up, and why."""
    warning: Text | None = None
    """Warnings of the job's start."""
    remaining_seconds: Tally | None = None
    """Estimated seconds left."""
    last_update_time: Time
    """Time of the report with these numbers, or the time at which the job's completion was recorded."""


class PlanStatus(StatusModel):
    """The decisions in force, since a mechanism with mode Auto may fall back to Disabled."""

    engine: Text | None = None
    """Engine of the generation workers, and why, such as torch: the worker has no GPU. If engines differ, the number of
    workers with each."""
    inter_stage: Text | None = None
    """Inter-stage fusion: the choice, such as threshold and pool, and its reason."""
    long_rounds: Text | None = None
    """Why a job with rollout.longRounds Auto has long rounds or none."""
    speculation: Text | None = None
    """Speculative decoding: Disabled, or a summary of recent drafting."""
    speculation_switched: Text | None = None
    """When and why drafting last switched off or on."""
    predicted_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds of generation and inference per iteration."""
    devices: dict[str, Any] | None = None
    """Plan for spec.devices, with its sizes and the predicted seconds of an iteration."""
    drift: Text | None = None
    """How that plan's predictions became wrong, and what follows."""


class MigrationPool(StatusModel):
    """Generation workers that decode the long tail while the others score."""

    replicas: Tally
    """Number of workers in the pool now."""
    generation_replicas: Tally
    """Number of generation workers wanted."""
    threshold: Tally
    """Number of unfinished samples at which the tail migrates; 0: it does not migrate."""
    summary: Annotated[str, Field(max_length=32)]
    """Pool workers out of all generation workers, such as 1/4."""
    released: Tally = 0
    """Number of released generation workers, which score meanwhile."""
    workers: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=64)] = Field(default_factory=list)
    """Names of the workers in the pool, at most 64. Their pods carry the label rlhf.dev/migration-pool."""
    last_event_time: Time | None = None
    """Time of the last event that reported a pool formed or dissolved, at most one per minute."""


class CheckpointStatus(StatusModel):
    """A finished checkpoint."""

    path: Annotated[str, Field(max_length=4096)]
    """Its folder."""
    iteration: Tally
    """Number of iterations trained at that point."""
    time: Time
    """Time of the first report of it that the operator read."""


class AccountedEnd(StatusModel):
    """The end of a pod or its container, recorded so that it is counted only once."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    id: Annotated[str, Field(max_length=64)]
    """UID of the pod, or the first characters of its container's ID, or the UID and the number of restarts."""


class BackOff(StatusModel):
    """Back-off of a pod that ended. Further ends in a row delay its replacement longer, up to five minutes."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod and its replacement."""
    ends: Annotated[int, Field(ge=1)]
    """Number of consecutive ends of pods of this name. A pod that ran for five minutes before its end counts as the
    first."""
    until: Time
    """Earliest time of a replacement."""
    template: Annotated[str, Field(max_length=64)] | None = None
    """Template hash of the last pod. Another template restarts the count."""
    reason: Annotated[str, Field(max_length=256)] | None = None
    """Why the last pod ended; stored for the newest entries only."""


class RestartStatus(StatusModel):
    """Counts of failures and disruptions, which survive restarts of the operator."""

    failures: Tally = 0
    """Number of failures that count towards runPolicy.backoffLimit."""
    disruptions: Tally = 0
    """Number of disruptions, such as evictions, preemption and node loss, and of other ends that the failure policy
    ignores. They do not count towards runPolicy.backoffLimit."""
    last_reason: Text | None = None
    """Description of the last counted end."""
    last_time: Time | None = None
    """Time at which the operator recorded lastReason."""
    accounted: Annotated[list[AccountedEnd], Field(max_length=12500)] = Field(default_factory=list)
    """Counted ends of pods that still exist, and pods that the operator deletes."""
    back_off: Annotated[list[BackOff], Field(max_length=12500)] = Field(default_factory=list)
    """Pods that ended, and the earliest times of their replacements."""


class RevisionStatus(StatusModel):
    """Versions that a running job uses, independent of operator upgrades (docs/upgrading.md)."""

    coordinator_image: Annotated[str, Field(max_length=1024)] | None = None
    """Coordinator image, unless its pod template sets one."""
    worker_image: Annotated[str, Field(max_length=1024)] | None = None
    """Worker image, unless the pod template sets one."""
    vllm_worker_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of vLLM generation workers, unless their pod template sets one. Unset: workerImage."""
    digest: Annotated[str, Field(max_length=64)] | None = None
    """Content hash of the job's ConfigMap. The operator creates pods only from this content."""
    previous_digest: Annotated[str, Field(max_length=64)] | None = None
    """Content hash of the ConfigMap that is being replaced."""


class ReleaseStatus(StatusModel):
    """The latest release of resources by a job that could not start. Absent once the job runs, ends or is suspended."""

    attempts: Annotated[int, Field(ge=1)]
    """Number of consecutive releases."""
    since: Time
    """Time of the release."""
    until: Time
    """Time of the next attempt."""
    generation: Tally
    """metadata.generation at that time; a change triggers an attempt at once."""
    reason: Text
    """Why the job could not start, and since when."""


class RLHFJobStatus(StatusModel):
    """The operator's observations."""

    observed_generation: Tally | None = None
    """metadata.generation of this status."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """Planned, Admitted, Running, Resizing, Restarting, Suspended, Complete and Failed. The first reconcile sets
    all."""
    algorithm: Annotated[str, Field(max_length=64)] | None = None
    """Name of the algorithm: the member of spec.algorithm that is set."""
    start_time: Time | None = None
    """Time of the last start or resumption."""
    completion_time: Time | None = None
    """Time at which the job became Complete or Failed."""
    revision: RevisionStatus | None = None
    """Versions in use, from the job's start until it is suspended."""
    groups: Annotated[
        list[GroupStatus],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """The pods of each group that the algorithm needs."""
    scale: ScaleStatus | None = None
    """Data of the scale subresource."""
    progress: ProgressStatus | None = None
    """Progress of the job."""
    plan: PlanStatus | None = None
    """The decisions in force."""
    migration_pool: MigrationPool | None = None
    """The workers that decode the long tail."""
    last_checkpoint: CheckpointStatus | None = None
    """The newest finished checkpoint."""
    journal_lock_shared: bool | None = None
    """Whether other nodes see the lock of the coordinator's journal. Set only with
    runPolicy.forceCoordinatorAfterSeconds."""
    restarts: RestartStatus | None = None
    """Counts of failures and disruptions, and back-offs of pods."""
    release: ReleaseStatus | None = None
    """Why and until when the job has no resources."""
