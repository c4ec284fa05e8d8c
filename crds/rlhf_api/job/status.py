"""`status` of an RLHFJob: what the operator observed. Small and slow-changing; fast numbers go to Prometheus.

Rule: only the operator writes it, at most once in ten seconds for progress. Readers ignore fields they do not know,
because a newer operator may have written them. Texts such as "37/100" exist because a printer column shows one value.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from rlhf_api.api_model import ApiModel


def _a_time(value: str) -> str:
    """The API server refuses another text as date-time, and writing a stored one back must not be refused."""
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError("a time has a zone")
    return value


def _as_stored(value: int) -> int:
    """The API server keeps integers of 64 bits."""
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
    """One observation in the form of Kubernetes' metav1.Condition; types and reasons are in `rlhf_api.conditions`."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """What is observed, such as Running."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in words a user can act on."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Tally | None = None
    """metadata.generation this was observed for."""


class GroupStatus(StatusModel):
    """The pods of one group."""

    name: Literal["coordinator", "generation", "inference", "training"]
    """The group."""
    desired: Tally
    """Pods wanted."""
    ready: Tally
    """Pods registered with the coordinator and ready to work."""
    failed: Tally = 0
    """Pods that ended with a failure and are not yet replaced."""
    restarts: Tally = 0
    """Pods replaced since the job was created."""
    epoch: Tally = 0
    """Raised each time the failure policy restarts the whole group; its pods carry it as the label rlhf.dev/epoch."""
    updated: Tally = 0
    """Pods made from the group's present template."""


class Scale(StatusModel):
    """What the scale subresource reports of the generation group."""

    replicas: Tally
    """Generation pods that exist."""
    selector: Annotated[str, Field(max_length=512)]
    """Label selector of the generation pods, for autoscalers."""


class Progress(StatusModel):
    """How far the job is; refreshed at most every ten seconds."""

    iteration: Tally
    """Iterations trained."""
    iterations: Tally
    """Iterations wanted."""
    summary: Annotated[str, Field(max_length=32)]
    """Both, such as 37/100."""
    stage: Annotated[str, Field(max_length=64)] | None = None
    """What is going on now, such as Generating or Training."""
    reward: float | None = None
    """Mean reward of the last iteration."""
    kl: float | None = None
    """Mean KL divergence to the reference in the last iteration, nats a response: what klTarget is compared with."""
    kl_per_token: float | None = None
    """The same, nats a token."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Samples trained a second, over the last iteration."""
    non_finite_steps: Tally | None = None
    """Optimizer steps skipped so far because a loss or gradient was infinite or NaN."""
    remaining_seconds: Tally | None = None
    """Estimate of the time left."""
    last_update_time: Time
    """When these numbers were read from the coordinator."""


class Plan(StatusModel):
    """The decisions in force; each names what was chosen, as Auto may fall back to Disabled."""

    inter_stage: Text
    """Disabled, or the migration threshold and pool in words."""
    intra_stage: Text | None = None
    """Training schedule in force, such as serial-1f1b."""
    speculation: Text | None = None
    """Disabled, or the drafting method."""
    predicted_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted time of generation and inference of an iteration."""


class MigrationPool(StatusModel):
    """Generation workers that keep the long tail while the others score."""

    replicas: Tally
    """Workers in the pool now."""
    generation_replicas: Tally
    """Workers of the generation group."""
    threshold: Tally
    """Unfinished samples at which the tail moves; 0 when migration is off."""
    summary: Annotated[str, Field(max_length=32)]
    """Both counts, such as 1/4."""
    released: Tally = 0
    """Generation workers that score meanwhile."""
    workers: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=64)] = Field(default_factory=list)
    """Names of those in the pool, at most 64; their pods carry the label rlhf.dev/migration-pool."""
    last_event_time: Time | None = None
    """When an event last told that the pool came or went; at most once a minute."""


class CheckpointStatus(StatusModel):
    """A finished checkpoint."""

    path: Annotated[str, Field(max_length=4096)]
    """Its folder."""
    iteration: Tally
    """Iterations trained when it was made."""
    time: Time
    """When it was finished."""


class AccountedEnd(StatusModel):
    """An end of a pod or of its container that the counts include already, so that it is never counted twice."""

    pod: Annotated[str, Field(max_length=253)]
    """The pod's name."""
    id: Annotated[str, Field(max_length=64)]
    """UID of the pod, or the beginning of its container's id."""


class BackOff(StatusModel):
    """A place whose pod ended lately: each further end makes it wait longer for its next pod."""

    pod: Annotated[str, Field(max_length=253)]
    """The pod's name, which is the place's."""
    ends: Annotated[int, Field(ge=1)]
    """Pods that ended there in a row, none of which had run for five minutes."""
    until: Time
    """No pod is made there before."""
    template: Annotated[str, Field(max_length=64)] | None = None
    """Fingerprint of the template the last one was made from; with another, the place begins anew."""
    reason: Annotated[str, Field(max_length=256)] | None = None
    """Why the last one ended."""


class Restarts(StatusModel):
    """Restart accounting; survives the operator."""

    failures: Tally = 0
    """Restarts that count towards runPolicy.backoffLimit."""
    disruptions: Tally = 0
    """Restarts after evictions, preemption, node loss, or what the failure policy ignores; they do not count."""
    last_reason: Text | None = None
    """Why the last one happened."""
    last_time: Time | None = None
    """When the last one happened."""
    accounted: Annotated[list[AccountedEnd], Field(max_length=12500)] = Field(default_factory=list)
    """Ends of pods that still exist; the counts include them."""
    back_off: Annotated[list[BackOff], Field(max_length=12500)] = Field(default_factory=list)
    """Places whose pod ended lately, and when the next one is made."""


class RevisionStatus(StatusModel):
    """What the job runs by from its start on, whatever the version of the operator; docs/upgrading.md."""

    coordinator_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of the coordinator where its pod template names none."""
    worker_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of workers whose pod template names none."""
    digest: Annotated[str, Field(max_length=64)] | None = None
    """Of what the job's ConfigMap holds; the operator makes pods from no other."""
    previous_digest: Annotated[str, Field(max_length=64)] | None = None
    """The same of what it holds until it is written anew."""


class Release(StatusModel):
    """The job gave back what its pods held, as they could not start; kept until it is at work."""

    attempts: Annotated[int, Field(ge=1)]
    """Times in a row."""
    since: Time
    """When it was decided."""
    until: Time
    """When the job tries again."""
    generation: Tally
    """metadata.generation it was decided for; with another one the job tries again at once."""
    reason: Text
    """Which pod could not start, why, and since when."""


class RLHFJobStatus(StatusModel):
    """What the operator observed."""

    observed_generation: Tally | None = None
    """metadata.generation this status was made for."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """Planned, Admitted, Running, Resizing, Restarting, Suspended, Complete, Failed; all are set on the first visit."""
    algorithm: Annotated[str, Field(max_length=64)] | None = None
    """Which member of spec.algorithm is set."""
    start_time: Time | None = None
    """When the first pod was created."""
    completion_time: Time | None = None
    """When the job completed or failed."""
    revision: RevisionStatus | None = None
    """What the job runs by, while it has started and is not suspended."""
    groups: Annotated[
        list[GroupStatus],
        Field(
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """The pods of each group that the algorithm needs."""
    scale: Scale | None = None
    """What the scale subresource reports."""
    progress: Progress | None = None
    """How far the job is."""
    plan: Plan | None = None
    """The decisions in force."""
    migration_pool: MigrationPool | None = None
    """The pool of the long tail."""
    last_checkpoint: CheckpointStatus | None = None
    """The newest finished checkpoint."""
    journal_lock_shared: bool | None = None
    """Other nodes see the lock of the coordinator's journal; only with runPolicy.forceCoordinatorAfterSeconds."""
    restarts: Restarts | None = None
    """Restart accounting."""
    release: Release | None = None
    """Why and until when the job holds nothing."""
