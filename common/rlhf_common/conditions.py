"""Condition types and reasons of an RLHFJob, which users use in scripts. No logic.

Rule: a type is a state, never a verb.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """Observed states of a job."""

    PLANNED = "Planned"
    """The manifest is valid and resolved, and has a plan."""
    ADMITTED = "Admitted"
    """The cluster's queue, if any, lets the job use its resources."""
    RUNNING = "Running"
    """The coordinator answers, and the job is not starting, recovering or stopping."""
    RESIZING = "Resizing"
    """A group is being scaled; the job continues meanwhile."""
    RESTARTING = "Restarting"
    """Pods are replaced on purpose: their template or a setting changed, or the failure policy restarts several pods.
    """
    SUSPENDED = "Suspended"
    """spec.suspend is true and no worker runs."""
    COMPLETE = "Complete"
    """All iterations are trained. Final."""
    FAILED = "Failed"
    """The job failed; the message says why. Final."""


class RunningReason(StrEnum):
    """Reasons of `Running`, shown as the phase."""

    PENDING = "Pending"
    """Nothing has been started."""
    QUEUED = "Queued"
    """The job waits for admission."""
    NAME_TAKEN = "NameTaken"
    """A foreign object has a name that the job needs, and the job has no pods."""
    RELEASED = "Released"
    """The job could not start. Its pods are deleted and their resources released; it tries again later."""
    UNSCHEDULABLE = "Unschedulable"
    """No node can take some of the pods."""
    STARTING = "Starting"
    """Pods start and load their models, or the job awaits its plan."""
    RUNNING = "Running"
    """Iterations are in progress."""
    RECOVERING = "Recovering"
    """A process was lost or does not answer."""
    CHECKPOINTING = "Checkpointing"
    """The pods of a job with spec.checkpoints end, after a last checkpoint if one can be saved."""
    STOPPING = "Stopping"
    """The pods of a job without spec.checkpoints end, because it is suspended or not admitted; nothing is saved."""
    SUSPENDED = "Suspended"
    """Stopped by spec.suspend."""
    COMPLETE = "Complete"
    """All iterations are trained."""
    FAILED = "Failed"
    """The job failed."""


class PlannedReason(StrEnum):
    """Reasons of `Planned`."""

    PLANNED = "PlanMade"
    INVALID = "InvalidManifest"
    """The manifest is invalid; the message says why."""
    REFUSED = "PodsRefused"
    """The API server rejects pods from the job's templates in a dry run; the message quotes it."""
    UNAVAILABLE = "NotAvailableInThisVersion"
    """The manifest uses a mode that this version does not support (`rlhf_api.rules.unavailable`)."""
    NOT_SERVED = "NotAvailableInThisCluster"
    """spec.scheduling.gang.mode names a scheduler that this cluster does not serve, or this operator may not use."""


class AdmittedReason(StrEnum):
    """Reasons of `Admitted`."""

    NO_QUEUE = "NoQueue"
    """The job uses no queueing system, so nothing holds it back."""
    ADMITTED = "QuotaReserved"
    WAITING = "WaitingForQuota"
    EVICTED = "Evicted"
    """Admission was revoked; the job stops and waits again."""
    NOT_SERVED = "QueueNotServed"
    """The job names a queue that cannot be used here; it waits."""
    NOT_QUEUED = "NotQueued"
    """The job is suspended or backs off, and no quota is reserved for it."""


class ResizingReason(StrEnum):
    """Reasons of `Resizing`."""

    STABLE = "AtDesiredSize"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    """Workers leave."""
    LIMITED = "LimitedByQueue"
    """The spec asks for more pods than the queue has admitted; the job continues with those."""


class RestartingReason(StrEnum):
    """Reasons of `Restarting`."""

    NONE = "NotRestarting"
    ROLLING = "RollingUpdate"
    """A pod template or a setting changed; outdated pods are replaced."""
    KEPT = "SettingsKept"
    """The coordinator's template or a setting for its start changed; its pod stays, because the job has no
    checkpoints."""
    GROUP = "GroupRestart"
    """spec.runPolicy.failurePolicy restarts a whole group."""
    JOB = "JobRestart"
    """spec.runPolicy.failurePolicy restarts the whole job with its coordinator."""


class SuspendedReason(StrEnum):
    """Reasons of `Suspended`."""

    NOT_SUSPENDED = "NotSuspended"
    SUSPENDED = "SuspendRequested"
    STOPPING = "Stopping"
    """Suspension is requested; the pods end, after a checkpoint if one can be saved."""


class FinishedReason(StrEnum):
    """Reasons of `Complete` and `Failed`."""

    NOT_FINISHED = "NotFinished"
    COMPLETE = "AllIterationsTrained"
    BACKOFF_LIMIT = "BackoffLimitExceeded"
    POLICY = "FailurePolicy"
    """A rule of spec.runPolicy.failurePolicy decided it."""
    DEADLINE = "DeadlineExceeded"
    USER_CODE = "RewardFailed"
    BAD_MODEL = "BadModel"
    BAD_DATA = "BadPrompts"
    STORAGE = "StorageFailed"
    SAMPLE = "SampleFailed"
    INVALID = "InvalidManifest"
    ADDRESS_IN_USE = "AddressInUse"
