"""`status` of an RLHFJob: what the operator observed. It is small and changes slowly; fast numbers go to Prometheus.

Rule: only the operator writes it, progress at most once in ten seconds. Readers ignore fields they do not know, because
a newer operator may have written them. Texts such as "37/100" exist because a printer column shows a single value.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from rlhf_api.api_model import ApiModel


def _a_time(value: str) -> str:
    """Return a time; raise ValueError for one without a zone, which the API server would refuse as date-time."""
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError("a time has a zone")
    return value


def _as_stored(value: int) -> int:
    """Return an integer; raise ValueError for one of more than the 64 bits that the API server keeps."""
    if value >= 2**63:
        raise ValueError("an integer has 64 bits")
    return value


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64), AfterValidator(_a_time)]
"""RFC 3339, in UTC, such as 2026-08-22T10:00:00Z."""
Text = Annotated[str, Field(max_length=1024)]
Tally = Annotated[int, Field(ge=0), AfterValidator(_as_stored)]


class StatusModel(ApiModel):
    """A part of the status."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One observation, as metav1.Condition of Kubernetes; `rlhf_common.conditions` lists types and reasons."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """What is observed, such as Running."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in words that a user can act on."""
    last_transition_time: Time
    """When the field status last changed."""
    observed_generation: Tally | None = None
    """metadata.generation for which this was observed."""


class GroupStatus(StatusModel):
    """The pods of one group."""

    name: Literal["coordinator", "generation", "inference", "training"]
    """Name of the group."""
    desired: Tally
    """Number of pods wanted."""
    ready: Tally
    """Number of pods that are registered with the coordinator and ready to work."""
    failed: Tally = 0
    """Number of pods that ended with a failure and are not yet replaced."""
    restarts: Tally = 0
    """Number of pods replaced since the job was created."""
    out_of_memory: Tally = 0
    """Number of containers that were killed for using more memory than their limit."""
    epoch: Tally = 0
    """How often the failure policy restarted the whole group. Its pods have it as label
    rlhf.dev/epoch."""
    updated: Tally = 0
    """Number of pods created from the group's present template."""


class ScaleStatus(StatusModel):
    """What the scale subresource reports about the generation group."""

    replicas: Tally
    """Number of generation pods that exist."""
    selector: Annotated[str, Field(max_length=512)]
    """Label selector of the generation pods, for autoscalers."""


class ProgressStatus(StatusModel):
    """How far the job is, updated at most every ten seconds."""

    iteration: Tally
    """Number of iterations trained."""
    iterations: Tally
    """Number of iterations wanted."""
    summary: Annotated[str, Field(max_length=32)]
    """Both numbers, such as 37/100."""
    stage: Annotated[str, Field(max_length=64)] | None = None
    """Present stage, such as Generating or Training."""
    reward: float | None = None
    """Mean reward of the last iteration."""
    kl: float | None = None
    """Mean KL divergence to the reference in the last iteration, in nats per response. klTarget is compared with it."""
    kl_per_token: float | None = None
    """The same in nats per token."""
    loss: float | None = None
    """Mean loss of the last iteration, of a job that generates nothing and so has no reward."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Samples trained per second in the last iteration."""
    non_finite_steps: Tally | None = None
    """Number of optimizer steps skipped so far because a loss or gradient was infinite or NaN."""
    evaluation_reward: float | None = None
    """Mean reward of the last evaluation."""
    evaluation_version: Tally | None = None
    """The weight version that it evaluated."""
    best_evaluation_reward: float | None = None
    """Mean reward of the best evaluation so far."""
    best_evaluation_version: Tally | None = None
    """The weight version that it evaluated."""
    sample_failure: Annotated[str, Field(max_length=1024)] | None = None
    """The sample of the iteration in progress that workers failed on last, how, and what follows."""
    tracker_lost: Annotated[str, Field(max_length=1024)] | None = None
    """The tracker of metrics that this coordinator gave up last, and why."""
    warning: Text | None = None
    """Warnings of the job's start."""
    remaining_seconds: Tally | None = None
    """Estimate of the seconds left."""
    last_update_time: Time
    """When these numbers were read from the coordinator."""


class PlanStatus(StatusModel):
    """The decisions in force: what was chosen for each mechanism, as Auto may fall back to Disabled."""

    engine: Text | None = None
    """What generation workers decode by, and why, such as torch: the worker has no GPU. Where they differ, how many
    workers decode by what."""
    inter_stage: Text | None = None
    """Inter-stage fusion: Disabled, or its threshold and pool in words."""
    intra_stage: Text | None = None
    """Intra-stage fusion: the training schedule, such as serial-1f1b."""
    speculation: Text | None = None
    """Speculative decoding: Disabled, or what drafts gave in the last iteration, in words with numbers."""
    speculation_switched: Text | None = None
    """When and why drafting was last switched off or on."""
    predicted_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds of generation and inference per iteration."""


class MigrationPool(StatusModel):
    """Generation workers that keep the long tail while the others score."""

    replicas: Tally
    """Number of workers in the pool now."""
    generation_replicas: Tally
    """Number of workers of the generation group."""
    threshold: Tally
    """Number of unfinished samples at which the tail migrates; 0 when migration is disabled."""
    summary: Annotated[str, Field(max_length=32)]
    """Workers in the pool of all generation workers, such as 1/4."""
    released: Tally = 0
    """Number of generation workers that were released and score meanwhile."""
    workers: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=64)] = Field(default_factory=list)
    """Names of the workers in the pool, at most 64. Their pods carry the label rlhf.dev/migration-pool."""
    last_event_time: Time | None = None
    """When an event last reported that the pool was formed or dissolved, at most once per minute."""


class CheckpointStatus(StatusModel):
    """A finished checkpoint."""

    path: Annotated[str, Field(max_length=4096)]
    """Its folder."""
    iteration: Tally
    """Number of iterations trained when it was made."""
    time: Time
    """When it was finished."""


class AccountedEnd(StatusModel):
    """An end of a pod or of its container that is counted already, so that it is never counted twice."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    id: Annotated[str, Field(max_length=64)]
    """UID of the pod, or the beginning of the id of its container."""


class BackOff(StatusModel):
    """Back-off of a pod that ended recently: every further end makes its replacement wait longer."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod, which its replacement keeps."""
    ends: Annotated[int, Field(ge=1)]
    """Number of pods of this name that ended in a row, none of which had run for five minutes."""
    until: Time
    """Time before which no replacement is created."""
    template: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the template of the last pod. With another template the count starts again."""
    reason: Annotated[str, Field(max_length=256)] | None = None
    """Why the last pod ended."""


class RestartStatus(StatusModel):
    """Counts of restarts, which a restart of the operator does not lose."""

    failures: Tally = 0
    """Number of restarts that count towards runPolicy.backoffLimit."""
    disruptions: Tally = 0
    """Number of restarts after evictions, preemption, node loss, or what the failure policy ignores; they do not count
    towards runPolicy.backoffLimit."""
    last_reason: Text | None = None
    """Reason of the last restart."""
    last_time: Time | None = None
    """When the last restart happened."""
    accounted: Annotated[list[AccountedEnd], Field(max_length=12500)] = Field(default_factory=list)
    """Ends of pods that still exist and that are counted already."""
    back_off: Annotated[list[BackOff], Field(max_length=12500)] = Field(default_factory=list)
    """Pods that ended recently, and when their replacements are created."""


class RevisionStatus(StatusModel):
    """What the job runs by from its start to its end, whatever the version of the operator (docs/upgrading.md)."""

    coordinator_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of the coordinator, where its pod template names none."""
    worker_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of workers, where their pod template names none."""
    vllm_worker_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of generation workers that decode by vLLM, where their pod template names none. Unset: workerImage."""
    digest: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the content of the job's ConfigMap. The operator creates pods from no other content."""
    previous_digest: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the content that the ConfigMap still holds while it is being replaced."""


class ReleaseStatus(StatusModel):
    """The job gave back the resources of its pods because they could not start. Kept until the job runs."""

    attempts: Annotated[int, Field(ge=1)]
    """Number of times in a row."""
    since: Time
    """When the resources were given back."""
    until: Time
    """When the job tries again."""
    generation: Tally
    """metadata.generation at that time; with another one the job tries again at once."""
    reason: Text
    """Which pod could not start, why, and since when."""


class RLHFJobStatus(StatusModel):
    """What the operator observed."""

    observed_generation: Tally | None = None
    """metadata.generation for which this status was made."""
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
    """When the first pod was created."""
    completion_time: Time | None = None
    """When the job became Complete or Failed."""
    revision: RevisionStatus | None = None
    """What the job runs by, from its start until it ends or is suspended."""
    groups: Annotated[
        list[GroupStatus],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """The pods of each group that the algorithm needs."""
    scale: ScaleStatus | None = None
    """What the scale subresource reports."""
    progress: ProgressStatus | None = None
    """How far the job is."""
    plan: PlanStatus | None = None
    """The decisions in force."""
    migration_pool: MigrationPool | None = None
    """The pool that keeps the long tail."""
    last_checkpoint: CheckpointStatus | None = None
    """The newest finished checkpoint."""
    journal_lock_shared: bool | None = None
    """Whether other nodes see the lock of the coordinator's journal. Only set with
    runPolicy.forceCoordinatorAfterSeconds."""
    restarts: RestartStatus | None = None
    """Counts of restarts."""
    release: ReleaseStatus | None = None
    """Why and until when the job holds no resources."""
