"""The summary at the top of `rlhf describe`: the job's activity, or its obstacle and the remedy. Pure.

Rule: the operator's message comes before findings about pods.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from rlhf_cli.cluster.cluster_job import ClusterJob, age, moment, number, shortened
from rlhf_cli.cluster.cluster_pod import ClusterPod
from rlhf_cli.console import duration
from rlhf_common.conditions import ConditionType, FinishedReason, RunningReason, SuspendedReason

OPERATOR_PATIENCE: Final = timedelta(seconds=20)
"""Time within which a running operator is expected to see a new job and to renew its Lease."""
MAX_MESSAGE: Final = 400
"""Maximum characters of a message about a job that waits."""
_TRANSIENT_STATES: Final = frozenset({"Leaving", "Ended", "Starting"})
"""States that usually end by themselves."""
_NEW_JOB: Final = "create a new job: with spec.checkpoints at the same path it goes on from there"
_REMEDIES: Final[Mapping[str, str]] = {
    FinishedReason.USER_CODE: "correct the reward",
    FinishedReason.BAD_MODEL: "correct spec.models or the folder",
    FinishedReason.BAD_DATA: "correct spec.prompts or the file",
    FinishedReason.STORAGE: "free space or correct the volume",
    FinishedReason.DEADLINE: "raise spec.runPolicy.activeDeadlineSeconds",
    FinishedReason.BACKOFF_LIMIT: "correct the cause, or raise spec.runPolicy.backoffLimit",
}


def summarize(job: ClusterJob, pods: Sequence[ClusterPod], operator_age: timedelta | None, now: datetime) -> str:
    """Describe the job's activity or obstacle. `operator_age` is the time since the operator renewed its Lease; None if
    unknown.
    """
    if job.body["metadata"].get("deletionTimestamp"):
        return f"Being deleted; {len(pods)} of its pods are left."
    if not job.finished and (absence := _operator_absent(job, operator_age, now)):
        return absence
    return _finished(job, now) or _suspended(job) or _invalid(job) or _under_way(job, pods)


def _operator_absent(job: ClusterJob, operator_age: timedelta | None, now: datetime) -> str:
    """Say that the operator has not looked at the job or its last change, or does not run; empty otherwise."""
    remedy = "see that it runs: kubectl get pods -A -l app.kubernetes.io/name=rlhf-operator"
    if not job.status.get("conditions"):
        since = now - (job.created or now)
        if since < OPERATOR_PATIENCE:
            return "Just created; the operator has not looked at it yet."
        which, named = "No operator", job.operator_class
        if named:
            which = f"No operator of class {named}, which spec.operatorClass names,"
            remedy = (
                f"see that one was started with --operator-class={named} (operatorClass in the values of its chart)"
            )
        return f"{which} has looked at it since it was created {duration(since.total_seconds())} ago; {remedy}."
    if operator_age is not None and operator_age > OPERATOR_PATIENCE:
        gone = duration(operator_age.total_seconds())
        return (
            f"The operator does not run (its Lease is {gone} old), so what is shown may be as old; a job that runs"
            f" goes on without it; {remedy}."
        )
    if int(job.status.get("observedGeneration") or 0) < int(job.body["metadata"].get("generation") or 0):
        return "Its manifest was changed, and the operator has not looked at the change yet."
    return ""


def _finished(job: ClusterJob, now: datetime) -> str:
    if job.holds(ConditionType.FAILED):
        reason = str(job.condition(ConditionType.FAILED).get("reason"))
        remedy = f"{_capitalized(_REMEDIES.get(reason, 'correct the cause'))}, then {_NEW_JOB}."
        return f"Failed ({reason}): {_full_stop(job.message(ConditionType.FAILED))} {remedy}"
    if not job.holds(ConditionType.COMPLETE):
        return ""
    started, ended = moment(job.status.get("startTime")), moment(job.status.get("completionTime"))
    took = f" in {duration((ended - started).total_seconds())}" if started and ended else ""
    reward, loss = number(job.progress.get("reward"), 3), number(job.progress.get("loss"), 4)
    checkpoint = (job.status.get("lastCheckpoint") or {}).get("path")
    model = (
        f" The model is {checkpoint.rstrip('/')}/actor." if checkpoint else " spec.checkpoints was not set: no model."
    )
    last = f", last reward {reward}" if reward else f", last loss {loss}" if loss else ""
    return f"Complete: {job.iterations} iterations{took}{last}, {age(ended, now)} ago.{model}"


def _suspended(job: ClusterJob) -> str:
    suspended = job.condition(ConditionType.SUSPENDED)
    if suspended.get("reason") == SuspendedReason.STOPPING:
        return f"Stopping, because spec.suspend is true: {_full_stop(str(suspended.get('message')))}"
    if suspended.get("status") == "True":
        at = job.progress.get("summary")
        text = f"Suspended{f' at {at} iterations' if at else ''}: {_full_stop(str(suspended.get('message')))}"
        return f"{text} `rlhf resume {job.name}` does that."
    return ""


def _invalid(job: ClusterJob) -> str:
    planned = job.condition(ConditionType.PLANNED)
    if planned.get("status") != "False":
        return ""
    runs = "" if job.phase == RunningReason.PENDING else " Running pods continue."
    remedy = "Correct it by kubectl edit or apply; a fixed field needs a new job."
    return f"The manifest cannot be run: {_full_stop(str(planned.get('message')))}{runs} {remedy}"


def _under_way(job: ClusterJob, pods: Sequence[ClusterPod]) -> str:
    running = job.condition(ConditionType.RUNNING)
    message = str(running.get("message") or "not started yet")
    if job.holds(ConditionType.RUNNING):
        about = f" About {duration(job.seconds_left)} left." if job.seconds_left else ""
        return f"Running {_full_stop(message)}{about}"
    text = f"{job.phase}: {_full_stop(shortened(message, MAX_MESSAGE))}"
    queue = job.condition(ConditionType.ADMITTED)
    if queue.get("status") == "False" and str(queue.get("message")) not in message:
        return f"{text} {_capitalized(_full_stop(shortened(str(queue.get('message')), MAX_MESSAGE)))}"
    stuck = [pod for pod in pods if not pod.well and pod.explanation and pod.state not in _TRANSIENT_STATES]
    if stuck and not any(pod.pod.name in message for pod in stuck):
        first = stuck[0]
        return f"{text} {_capitalized(first.name)} is {first.state}: {_full_stop(shortened(first.explanation))}"
    if not stuck and job.phase in (RunningReason.STARTING, RunningReason.RECOVERING):
        return f"{text} No pod reports trouble; `rlhf logs {job.name} -f` shows what its pods do."
    return text


def _full_stop(text: str) -> str:
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "!", "?")) else f"{stripped}."


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
