"""The one sentence on top of a description: what a job does now, or what it waits for and what its user can do. Pure.

Rule: the operator's own words first; the pods' when they know better, because they are read now and the status is
written at most every ten seconds. A wait always ends in a remedy, or says that none is needed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from rlhf_api.conditions import ConditionType, FinishedReason, RunningReason, SuspendedReason
from rlhf_operator.cli.cluster.stored import Stored, age, moment, number
from rlhf_operator.cli.cluster.workers import Worker
from rlhf_operator.cli.console import duration

OPERATOR_PATIENCE: Final = timedelta(seconds=20)
"""An operator that runs has looked at a new or changed job long before."""
_AGAIN: Final = "correct the cause and create a new job: with spec.checkpoints at the same path it goes on from there"
_REMEDIES: Final[Mapping[str, str]] = {
    FinishedReason.USER_CODE: f"`rlhf logs --group inference` has its traceback; {_AGAIN}",
    FinishedReason.BAD_MODEL: f"correct spec.models; {_AGAIN}",
    FinishedReason.BAD_DATA: f"correct spec.prompts or the file; {_AGAIN}",
    FinishedReason.STORAGE: f"free space or correct the volume; {_AGAIN}",
    FinishedReason.DEADLINE: "raise spec.runPolicy.activeDeadlineSeconds in a new job; it goes on from the checkpoints",
}


def sentence(job: Stored, pods: Sequence[Worker], operator_age: timedelta | None, now: datetime) -> str:
    """`operator_age`: since the operator last said that it lives; None when that could not be read."""
    if job.body["metadata"].get("deletionTimestamp"):
        return f"Being deleted; {len(pods)} of its pods are left."
    if not job.finished and (absent := _unseen(job, operator_age, now)):
        return absent
    return _finished(job, now) or _stopped(job) or _refused(job) or _under_way(job, pods)


def _unseen(job: Stored, operator_age: timedelta | None, now: datetime) -> str:
    """The operator has not looked, or does not live."""
    remedy = "see that it runs: kubectl get pods -A -l app.kubernetes.io/name=rlhf-operator"
    if not job.status.get("conditions"):
        since = now - (job.created or now)
        if since < OPERATOR_PATIENCE:
            return "Just created; the operator has not looked at it yet."
        return f"No operator has looked at it since it was created {duration(since.total_seconds())} ago; {remedy}."
    if operator_age is not None and operator_age > OPERATOR_PATIENCE:
        gone = duration(operator_age.total_seconds())
        return (
            f"The operator does not run (its Lease is {gone} old), so what is shown may be as old; a job that runs"
            f" goes on without it; {remedy}."
        )
    if int(job.status.get("observedGeneration") or 0) < int(job.body["metadata"].get("generation") or 0):
        return "Its manifest was changed, and the operator has not looked at the change yet."
    return ""


def _finished(job: Stored, now: datetime) -> str:
    if job.holds(ConditionType.FAILED):
        condition = job.condition(ConditionType.FAILED)
        reason = str(condition.get("reason"))
        return f"Failed ({reason}): {_ended(str(condition.get('message')))} {_capital(_REMEDIES.get(reason, _AGAIN))}."
    if not job.holds(ConditionType.COMPLETE):
        return ""
    started, ended = moment(job.status.get("startTime")), moment(job.status.get("completionTime"))
    took = f" in {duration((ended - started).total_seconds())}" if started and ended else ""
    reward = number(job.progress.get("reward"), 3)
    checkpoint = (job.status.get("lastCheckpoint") or {}).get("path")
    model = (
        f" The model is {checkpoint.rstrip('/')}/actor." if checkpoint else " spec.checkpoints was not set: no model."
    )
    last = f", last reward {reward}" if reward else ""
    return f"Complete: {job.iterations} iterations{took}{last}, {age(ended, now)} ago.{model}"


def _stopped(job: Stored) -> str:
    suspended = job.condition(ConditionType.SUSPENDED)
    if suspended.get("reason") == SuspendedReason.STOPPING:
        return f"Stopping, because spec.suspend is true: {_ended(str(suspended.get('message')))}"
    if suspended.get("status") == "True":
        at = job.progress.get("summary")
        told = f"Suspended{f' at {at} iterations' if at else ''}: {_ended(str(suspended.get('message')))}"
        return f"{told} `rlhf resume {job.name}` does that."
    return ""


def _refused(job: Stored) -> str:
    planned = job.condition(ConditionType.PLANNED)
    if planned.get("status") != "False":
        return ""
    runs = "" if job.phase == RunningReason.PENDING else " What runs goes on."
    remedy = "Correct it by kubectl edit or apply; a field that is fixed for life needs a new job."
    return f"The manifest cannot be run: {_ended(str(planned.get('message')))}{runs} {remedy}"


def _under_way(job: Stored, pods: Sequence[Worker]) -> str:
    running = job.condition(ConditionType.RUNNING)
    message = str(running.get("message") or "not started yet")
    if job.holds(ConditionType.RUNNING):
        left = job.progress.get("remainingSeconds")
        about = f" About {duration(float(left))} left." if left else ""
        return f"Running {_ended(message)}{about}"
    told = f"{job.phase}: {_ended(message)}"
    stuck = next((each for each in pods if not each.well and each.told and each.state != "Leaving"), None)
    if stuck is not None and not _knows(message, stuck):
        return f"{told} {_capital(stuck.name)} {stuck.state}: {_ended(stuck.told)}"
    if stuck is None and job.phase in (RunningReason.STARTING, RunningReason.RECOVERING):
        return f"{told} Nothing is in its way; `rlhf logs {job.name} -f` shows what its pods do."
    return told


def _knows(message: str, stuck: Worker) -> bool:
    """The operator's message is about this pod's trouble."""
    return stuck.pod.name in message


def _ended(text: str) -> str:
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
