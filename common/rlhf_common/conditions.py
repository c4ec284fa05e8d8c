"""Condition types and reasons of an RLHFJob: the words that users script against.

Rule: a type is a state, never a verb. The first reconcile sets every type, as Unknown when nothing is known yet. A
condition that is False because of a wait names the wait in its reason. The reason of `Running` is also the PHASE column
of `kubectl get`, so it always is the most informative word about the job, whatever the status. There is no logic here.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """What is observed of a job."""

    PLANNED = "Planned"
    """The manifest is valid, resolved, and a plan is made for it."""
    ADMITTED = "Admitted"
    """The cluster's queue, where it has one, lets the job use its resources."""
    RUNNING = "Running"
    """Coordinator and all needed workers are ready and an iteration is under way."""
    RESIZING = "Resizing"
    """A group is being scaled; the job goes on meanwhile."""
    RESTARTING = "Restarting"
    """Pods are replaced on purpose: their template is another one, or the failure policy restarts more than one."""
    SUSPENDED = "Suspended"
    """spec.suspend is true and no worker runs."""
    COMPLETE = "Complete"
    """All iterations are trained. Final."""
    FAILED = "Failed"
    """The job gave up; the message says why. Final."""


class RunningReason(StrEnum):
    """Reasons of `Running`, shown as the phase."""

    PENDING = "Pending"
    """Seen, nothing decided yet."""
    QUEUED = "Queued"
    """Waits for admission."""
    NAME_TAKEN = "NameTaken"
    """An object that is not the job's has a name that one of its objects needs; the message names both ways out."""
    RELEASED = "Released"
    """Pods could not start: all are ended, their resources are given back, and the job tries again later."""
    UNSCHEDULABLE = "Unschedulable"
    """Pods exist that no node can take."""
    STARTING = "Starting"
    """Pods are coming up and load their models."""
    RUNNING = "Running"
    """Iterations are under way."""
    RECOVERING = "Recovering"
    """A process was lost; the job continues when it is back."""
    CHECKPOINTING = "Checkpointing"
    """The last checkpoint before a suspension is being made."""
    STOPPING = "Stopping"
    """The pods of a job without spec.checkpoints end before a suspension; nothing is saved."""
    SUSPENDED = "Suspended"
    """Stopped by spec.suspend."""
    COMPLETE = "Complete"
    """All iterations are trained."""
    FAILED = "Failed"
    """The job gave up."""


class PlannedReason(StrEnum):
    """Reasons of `Planned`."""

    PLANNED = "PlanMade"
    INVALID = "InvalidManifest"
    """A rule that the API server could not check is broken; the message names field, value and remedy."""
    REFUSED = "PodsRefused"
    """The API server, asked by a dry run, takes no pods made from the job's templates; the message has its words."""
    UNAVAILABLE = "NotAvailableInThisVersion"
    """The manifest asks for a mode that this version cannot do (`rlhf_api.rules.unavailable`)."""
    NOT_SERVED = "NotAvailableInThisCluster"
    """spec.scheduling.gang.mode names what this cluster does not serve, or this operator may not use."""
    DOES_NOT_FIT = "DoesNotFit"
    """The planner's memory estimate exceeds the devices."""


class AdmittedReason(StrEnum):
    """Reasons of `Admitted`."""

    NO_QUEUE = "NoQueue"
    """No queueing system is used; admitted at once."""
    ADMITTED = "QuotaReserved"
    WAITING = "WaitingForQuota"
    EVICTED = "Evicted"
    """Admission was taken back; the job checkpoints and waits again."""
    NOT_SERVED = "QueueNotServed"
    """The job names a queue that this operator does not use; it waits."""
    NOT_QUEUED = "NotQueued"
    """The job is suspended, or backs off: it asks its queue for nothing."""


class ResizingReason(StrEnum):
    """Reasons of `Resizing`."""

    STABLE = "AtDesiredSize"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    """Workers that leave hand back their samples first."""
    LIMITED = "LimitedByQueue"
    """The spec asks for more pods than the job's queue has admitted; the job goes on with those."""


class RestartingReason(StrEnum):
    """Reasons of `Restarting`."""

    NONE = "NotRestarting"
    ROLLING = "RollingUpdate"
    """A pod template or a setting changed; groups get it one after the other."""
    KEPT = "SettingsKept"
    """Settings changed that the coordinator reads when it starts, and without checkpoints it must not restart."""
    GROUP = "GroupRestart"
    """spec.runPolicy.failurePolicy restarts a whole group."""
    JOB = "JobRestart"
    """spec.runPolicy.failurePolicy restarts the whole job, the coordinator included."""


class SuspendedReason(StrEnum):
    """Reasons of `Suspended`."""

    NOT_SUSPENDED = "NotSuspended"
    SUSPENDED = "SuspendRequested"
    STOPPING = "Stopping"
    """Suspension is asked for; pods end, and with spec.checkpoints a checkpoint is saved first."""


class FinishedReason(StrEnum):
    """Reasons of `Complete` and `Failed`."""

    NOT_FINISHED = "NotFinished"
    COMPLETE = "AllIterationsTrained"
    BACKOFF_LIMIT = "BackoffLimitExceeded"
    POLICY = "FailurePolicy"
    """A rule of spec.runPolicy.failurePolicy says so."""
    DEADLINE = "DeadlineExceeded"
    USER_CODE = "RewardFailed"
    BAD_MODEL = "BadModel"
    BAD_DATA = "BadPrompts"
    STORAGE = "StorageFailed"
    SAMPLE = "SampleFailed"
    INVALID = "InvalidManifest"
    ERROR = "WorkerError"
