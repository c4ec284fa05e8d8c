"""The phases of a job's life and their conditions: complete, failed, stopped for a while, running. Rule: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import (
    ConditionType,
    FinishedReason,
    ResizingReason,
    RestartingReason,
    RunningReason,
    SuspendedReason,
)
from rlhf_common.names import COORDINATOR_PORT, Group
from rlhf_operator.gang.backend import QueueGate
from rlhf_operator.reconcile import device_plan
from rlhf_operator.reconcile.conditions import ConditionUpdate
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.diagnostics import diagnose, names_taken, occupied_names, unreadable_objects
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.timestamps import time_of

Updates = tuple[ConditionUpdate, ...]

COORDINATOR_PHASES: Final[Mapping[str, RunningReason]] = {
    "Starting": RunningReason.STARTING,
    "Recovering": RunningReason.RECOVERING,
    "Checkpointing": RunningReason.RUNNING,
}
"""Phase of the coordinator -> reason; the reason of other phases is Running."""
READING_VALID_FOR: Final = timedelta(seconds=60)
"""Age beyond which a reading says nothing about the present."""
_NOT_SUSPENDED: Final = ConditionUpdate(
    ConditionType.SUSPENDED, False, SuspendedReason.NOT_SUSPENDED, "spec.suspend is false"
)
_SAVES: Final = "the coordinator ends the optimizer step and saves a checkpoint"
_NOT_SAVED: Final = "spec.checkpoints is not set, so nothing is saved and the job"


@dataclass(frozen=True)
class Stopping:
    """The rest of a job that stops for a while."""

    pods_left: bool
    """Whether a pod is left whose worker has not ended."""
    saves: bool
    """Whether a coordinator of a job with checkpoints runs and is to end."""
    stays: Sequence[str] = ()
    """Messages about pods whose deletion does not end."""


def deadline(job: RLHFJob, started: datetime | None) -> datetime | None:
    """Return the end of spec.runPolicy.activeDeadlineSeconds, which restarts after a suspension; None: never."""
    seconds = job.spec.run_policy.active_deadline_seconds
    return None if seconds is None or started is None else started + timedelta(seconds=seconds)


def expiry(job: RLHFJob, status: Mapping[str, Any]) -> datetime | None:
    """Return when to delete a finished job; None: never."""
    seconds, finished = job.spec.run_policy.ttl_seconds_after_finished, time_of(status.get("completionTime"))
    return None if seconds is None or finished is None else finished + timedelta(seconds=seconds)


def reading_expires(context: ReconcileContext) -> float | None:
    """Return the seconds until the last reading of an unreachable coordinator expires; None without such a reading."""
    reading = context.reading
    if reading is None or not context.observed.unreachable:
        return None
    left = reading.at + READING_VALID_FOR + timedelta(seconds=1) - context.now
    return left.total_seconds() if left > timedelta() else None


def planned(context: ReconcileContext) -> ConditionUpdate:
    """Return the condition Planned: whether pods may be created from the manifest."""
    pinned = context.pinned
    warnings = f"; warning: {pinned.warnings}" if pinned.warnings else ""
    message = pinned.problem or f"{pinned.note or 'the manifest is valid'}{warnings}"
    return ConditionUpdate(ConditionType.PLANNED, pinned.planned, pinned.reason, message)


def nothing_started(problem: str) -> ConditionUpdate:
    """Return the condition Running of a job without pods whose manifest is refused."""
    message = f"nothing was started: {problem}"
    return ConditionUpdate(ConditionType.RUNNING, False, RunningReason.PENDING, message)


def completed(iterations: int) -> Updates:
    """Return the conditions of a job that has trained all its iterations."""
    message = f"all {iterations} iterations are trained"
    return (
        ConditionUpdate(ConditionType.COMPLETE, True, FinishedReason.COMPLETE, message),
        ConditionUpdate(ConditionType.RUNNING, False, RunningReason.COMPLETE, message),
        *_at_rest("the job has finished"),
    )


def failed(reason: FinishedReason, message: str, log: str = "") -> Updates:
    """Return the conditions of a failed job. `log`: lines to store below the message, because their pod is deleted."""
    return (
        ConditionUpdate(ConditionType.FAILED, True, reason, f"{message}\n{log}" if log else message),
        ConditionUpdate(ConditionType.RUNNING, False, RunningReason.FAILED, message),
        *_at_rest("the job has finished"),
    )


def suspended(job: RLHFJob, stopping: Stopping) -> Updates:
    """Return the conditions of a job that its user suspended."""
    checkpoint_note = (
        "it continues from its last checkpoint when spec.suspend is false again"
        if job.spec.checkpoints
        else f"{_NOT_SAVED} will start from the beginning when spec.suspend is false again"
    )
    at_rest = _at_rest("the job is suspended")
    if not stopping.pods_left:
        rest = [checkpoint_note, *stopping.stays]
        suspended = ". ".join([f"no worker runs; {rest[0]}", *rest[1:]])
        running = ". ".join([f"spec.suspend is true; {rest[0]}", *rest[1:]])
        return (
            *at_rest,
            ConditionUpdate(ConditionType.SUSPENDED, True, SuspendedReason.SUSPENDED, suspended),
            ConditionUpdate(ConditionType.RUNNING, False, RunningReason.SUSPENDED, running),
        )
    message = ". ".join([_SAVES if stopping.saves else f"the job's pods end; {checkpoint_note}", *stopping.stays])
    return (
        *at_rest,
        ConditionUpdate(ConditionType.SUSPENDED, False, SuspendedReason.STOPPING, message),
        ConditionUpdate(ConditionType.RUNNING, False, _stopping_reason(job), message),
    )


def queued(job: RLHFJob, gate: QueueGate, stopping: Stopping) -> Updates:
    """Return the conditions of a job that its queue does not admit, with or without pods left."""
    if not stopping.pods_left:
        message = ". ".join([f"nothing is started: {gate.message}", *stopping.stays])
        return _NOT_SUSPENDED, ConditionUpdate(ConditionType.RUNNING, False, RunningReason.QUEUED, message)
    ends = (
        "the job's pods end"
        if job.spec.checkpoints
        else f"the job's pods end; {_NOT_SAVED} starts from the beginning later"
    )
    message = ". ".join([f"{gate.message}; {_SAVES if stopping.saves else ends}", *stopping.stays])
    return _NOT_SUSPENDED, ConditionUpdate(ConditionType.RUNNING, False, _stopping_reason(job), message)


def _stopping_reason(job: RLHFJob) -> RunningReason:
    return RunningReason.CHECKPOINTING if job.spec.checkpoints else RunningReason.STOPPING


def backing_off(message: str) -> Updates:
    """Return the conditions of a job that could not start and releases its resources for a while."""
    running = ConditionUpdate(ConditionType.RUNNING, False, RunningReason.RELEASED, message)
    return (*_at_rest("the job holds no resources"), _NOT_SUSPENDED, running)


def running(context: ReconcileContext, waits: Sequence[str]) -> Updates:
    """Return the conditions of a job that should run. `waits`: messages about waiting pods and endless deletions."""
    job, observed, reading = context.job, context.observed, context.reading
    problems = [*occupied_names(job, observed), *waits, *unreadable_objects(observed), *names_taken(job, observed)]
    problems += diagnose(job, context.pods, observed.refusals, context.now, reading)
    if not context.pinned.planned and not context.pods:
        return _NOT_SUSPENDED, nothing_started(context.pinned.problem)
    if job.spec.awaits_plan and not problems:
        message = device_plan.waiting_message(context.stored, reading)
        return _NOT_SUSPENDED, ConditionUpdate(ConditionType.RUNNING, False, RunningReason.STARTING, message)
    coordinator = next((pod for pod in context.pods if pod.group == Group.COORDINATOR), None)
    recent = reading is not None and context.now - reading.at <= READING_VALID_FOR
    if reading is None or not recent or coordinator is None or not coordinator.active:
        return _NOT_SUSPENDED, _running_unheard(context, problems)
    reason = COORDINATOR_PHASES.get(reading.phase, RunningReason.RUNNING)
    if reason is RunningReason.STARTING and any(pod.stuck(context.now) for pod in context.pods):
        reason = RunningReason.UNSCHEDULABLE
    holds = reason is RunningReason.RUNNING
    message = _progress_message(reading, problems, waits=not holds)
    return _NOT_SUSPENDED, ConditionUpdate(ConditionType.RUNNING, holds, reason, message)


def _at_rest(message: str) -> Updates:
    return (
        ConditionUpdate(ConditionType.RESIZING, False, ResizingReason.STABLE, message),
        ConditionUpdate(ConditionType.RESTARTING, False, RestartingReason.NONE, message),
    )


def _progress_message(reading: CoordinatorReading, problems: list[str], *, waits: bool) -> str:
    stage = reading.phase.lower() or "starting"
    text = f"iteration {reading.iteration} ({reading.iteration} of {reading.iterations} are trained): {stage}"
    if reading.iteration >= reading.iterations:
        text = f"all {reading.iterations} iterations are trained; the coordinator ends"
    if waits and reading.waiting_for:
        more = len(reading.waiting_for) - 1
        text += f"; waits for {reading.waiting_for[0]}" + (f" and {more} more" if more else "")
    failures = [*reading.sample_failures[:1], *reading.lost_trackers[:1]]
    drift = [f"plan for spec.devices: {reading.plan_drift}"] if reading.plan_drift else []
    return ". ".join([text, *failures, *problems, *drift, *(f"warning: {warning}" for warning in reading.warnings)])


def _running_unheard(context: ReconcileContext, problems: list[str]) -> ConditionUpdate:
    """Return the condition Running of a job without a recent reading or an active coordinator."""
    observed, conditions = context.observed, context.conditions
    ready = sum(pod.ready for pod in context.pods)
    text = f"{ready} of {len(context.pods)} pods are ready" if context.pods else "its pods are being created"
    heard_before = bool(context.status.get("progress")) or observed.reading is not None
    if observed.occupied and not context.pods:
        reason = RunningReason.NAME_TAKEN
    elif any(pod.stuck(context.now) for pod in context.pods):
        reason = RunningReason.UNSCHEDULABLE
    elif heard_before or conditions.holds(ConditionType.RUNNING):
        reason, text = RunningReason.RECOVERING, f"the coordinator does not answer; {text}"
    elif conditions.reason(ConditionType.RUNNING) == RunningReason.RECOVERING:
        reason = RunningReason.RECOVERING
    else:
        reason = RunningReason.STARTING
    if observed.unreachable and not problems:
        text += f"; {observed.unreachable}"
        if any(pod.group == Group.COORDINATOR and pod.ready for pod in context.pods):
            text += f": see that no NetworkPolicy keeps the operator from port {COORDINATOR_PORT} of its pod"
    return ConditionUpdate(ConditionType.RUNNING, False, reason, ". ".join([*problems, text]))
