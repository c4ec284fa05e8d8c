"""What the job's life asks for now: finish, wait, stop, or run; each as conditions and pods to delete.

Rule: pure. A finished job is finished for good, and that is recorded before anything of it is deleted, so that what is
gone is never made again. A suspension asks the coordinator alone to stop, by deleting its pod: it then checkpoints with
the training ranks' help, which therefore go after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.conditions import (
    ConditionType,
    FinishedReason,
    ResizingReason,
    RestartingReason,
    RunningReason,
    SuspendedReason,
)
from rlhf_api.job import RLHFJob
from rlhf_api.names import COORDINATOR_PORT, Group
from rlhf_operator.reconcile.conditions import Conditions
from rlhf_operator.reconcile.diagnostics import names_taken, occupied, troubles, unread
from rlhf_operator.reconcile.observed_job import CoordinatorReading, ObservedJob
from rlhf_operator.reconcile.observed_pod import ObservedPod, time_of

COORDINATOR_PHASES: Final[Mapping[str, RunningReason]] = {
    "Starting": RunningReason.STARTING,
    "Recovering": RunningReason.RECOVERING,
    "Checkpointing": RunningReason.RUNNING,
}
"""Phases of the coordinator that are not simply Running."""
READING_GOOD_FOR: Final = timedelta(seconds=60)
"""A reading older than this says nothing about now."""


def deadline(job: RLHFJob, started: datetime | None) -> datetime | None:
    """When spec.runPolicy.activeDeadlineSeconds is over; counted anew after a suspension."""
    seconds = job.spec.run_policy.active_deadline_seconds
    return None if seconds is None or started is None else started + timedelta(seconds=seconds)


def expiry(job: RLHFJob, status: Mapping[str, Any]) -> datetime | None:
    """When a finished job is to be deleted."""
    seconds, finished = job.spec.run_policy.ttl_seconds_after_finished, time_of(status.get("completionTime"))
    return None if seconds is None or finished is None else finished + timedelta(seconds=seconds)


def completed(conditions: Conditions, iterations: int) -> None:
    """All is trained."""
    told = f"all {iterations} iterations are trained"
    conditions.set(ConditionType.COMPLETE, True, FinishedReason.COMPLETE, told)
    conditions.set(ConditionType.RUNNING, False, RunningReason.COMPLETE, told)
    _at_rest(conditions, "the job has finished")


def failed(conditions: Conditions, reason: FinishedReason, message: str, log: str = "") -> None:
    """The job gave up. `log`: lines that are kept below the message, as their pod is deleted."""
    conditions.set(ConditionType.FAILED, True, reason, f"{message}\n{log}" if log else message)
    conditions.set(ConditionType.RUNNING, False, RunningReason.FAILED, message)
    _at_rest(conditions, "the job has finished")


def _at_rest(conditions: Conditions, told: str) -> None:
    conditions.set(ConditionType.RESIZING, False, ResizingReason.STABLE, told)
    conditions.set(ConditionType.RESTARTING, False, RestartingReason.NONE, told)


def suspended(conditions: Conditions, job: RLHFJob, pods: Iterable[ObservedPod]) -> list[ObservedPod]:
    """Sets the conditions of a suspension, and answers the pods to delete now."""
    listed = list(pods)
    kept = (
        "it goes on from its last checkpoint when spec.suspend is false again"
        if job.spec.checkpoints
        else "spec.checkpoints is not set, so it will begin anew when spec.suspend is false again"
    )
    _at_rest(conditions, "the job is suspended")
    if not listed:
        conditions.set(ConditionType.SUSPENDED, True, SuspendedReason.SUSPENDED, f"no pod runs; {kept}")
        conditions.set(ConditionType.RUNNING, False, RunningReason.SUSPENDED, f"spec.suspend is true; {kept}")
        return []
    stopping = [pod for pod in listed if pod.group == Group.COORDINATOR]
    told = "the coordinator ends the optimizer step and saves a checkpoint" if stopping else "the workers end"
    conditions.set(ConditionType.SUSPENDED, False, SuspendedReason.STOPPING, told)
    conditions.set(ConditionType.RUNNING, False, RunningReason.CHECKPOINTING, told)
    return [pod for pod in stopping or listed if pod.deletion is None]


def released(conditions: Conditions, job: RLHFJob, told: str, pods: Iterable[ObservedPod]) -> list[ObservedPod]:
    """Sets the conditions of a job that gives everything back for a while, and answers the pods to delete now."""
    listed = list(pods)
    _at_rest(conditions, "the job holds no resources")
    conditions.set(ConditionType.SUSPENDED, False, SuspendedReason.NOT_SUSPENDED, "spec.suspend is false")
    conditions.set(ConditionType.RUNNING, False, RunningReason.RELEASED, told)
    stopping = [pod for pod in listed if pod.group == Group.COORDINATOR]
    return [pod for pod in stopping or listed if pod.deletion is None]


def running(
    conditions: Conditions,
    job: RLHFJob,
    observed: ObservedJob,
    now: datetime,
    waits: Sequence[str] = (),
    *,
    began: bool,
) -> None:
    """Sets Running and Suspended of a job that should run. `waits`: pods that are not made yet, in words; `began`: its
    coordinator was heard of before."""
    conditions.set(ConditionType.SUSPENDED, False, SuspendedReason.NOT_SUSPENDED, "spec.suspend is false")
    reading = observed.reading
    wrong = [*occupied(job, observed), *waits, *unread(observed), *names_taken(job, observed)]
    wrong += troubles(job, observed.pods.values(), observed.refusals, now, reading)
    coordinator = next((pod for pod in observed.pods.values() if pod.group == Group.COORDINATOR), None)
    if reading is None or now - reading.at > READING_GOOD_FOR or coordinator is None or not coordinator.active:
        _unread(conditions, observed, now, wrong, began=began or reading is not None)
        return
    reason = COORDINATOR_PHASES.get(reading.phase, RunningReason.RUNNING)
    if reason is RunningReason.STARTING and any(pod.stuck(now) for pod in observed.pods.values()):
        reason = RunningReason.UNSCHEDULABLE
    holds = reason is RunningReason.RUNNING
    conditions.set(ConditionType.RUNNING, holds, reason, _told(reading, wrong, waits=not holds))


def _told(reading: CoordinatorReading, wrong: list[str], *, waits: bool) -> str:
    stage = reading.phase.lower() or "starting"
    text = f"iteration {reading.iteration + 1} of {reading.iterations}: {stage}"
    if reading.iteration >= reading.iterations:
        text = f"all {reading.iterations} iterations are trained; the coordinator ends"
    if waits and reading.waiting_for:
        more = len(reading.waiting_for) - 1
        text += f"; waits for {reading.waiting_for[0]}" + (f" and {more} more" if more else "")
    return ". ".join([text, *wrong])


def _unread(conditions: Conditions, observed: ObservedJob, now: datetime, wrong: list[str], *, began: bool) -> None:
    """Running while the coordinator cannot say anything."""
    pods = observed.pods.values()
    ready = sum(pod.ready for pod in pods)
    text = f"{ready} of {len(observed.pods)} pods are ready" if observed.pods else "its pods are being created"
    if observed.occupied and not observed.pods:
        reason = RunningReason.NAME_TAKEN
    elif any(pod.stuck(now) for pod in pods):
        reason = RunningReason.UNSCHEDULABLE
    elif began or conditions.holds(ConditionType.RUNNING):
        reason, text = RunningReason.RECOVERING, f"the coordinator does not answer; {text}"
    elif conditions.reason(ConditionType.RUNNING) == RunningReason.RECOVERING:
        reason = RunningReason.RECOVERING
    else:
        reason = RunningReason.STARTING
    if observed.unreachable and not wrong:
        text += f"; {observed.unreachable}"
        if any(pod.group == Group.COORDINATOR and pod.ready for pod in pods):
            text += f": see that no NetworkPolicy keeps the operator from port {COORDINATOR_PORT} of its pod"
    conditions.set(ConditionType.RUNNING, False, reason, ". ".join([*wrong, text]))
