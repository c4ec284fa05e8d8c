"""Hastens or forces deletions of pods that do not end, and describes those that remain. Rule: pure.

For a coordinator that may still run, the user decides (spec.runPolicy.forceCoordinatorAfterSeconds), and it must have
reported that other nodes see the lock of its journal.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.names import ExitCode, Group
from rlhf_operator.manifests.pods import WORKER_GRACE_SECONDS
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import SIDECAR_GRACE_SECONDS, JobEvent, PodDeletion
from rlhf_operator.reconcile.timestamps import rfc3339
from rlhf_operator.untrusted import DeletedObject, UnreadableObject, describe_finalizers

FORCE_AFTER: Final = timedelta(seconds=30)
"""Time beyond a pod's grace period after which its deletion is forced, or a coordinator's node counts as lost."""
FAREWELL: Final = timedelta(seconds=15)
"""Time after the end of the last worker by which a coordinator may count as ended (`farewell_time`)."""
FINALIZER_PATIENCE: Final = timedelta(seconds=10)
"""Time after a pod's grace period, or after the deletion request of another object, until finalizers are reported."""
SHOWN: Final = 3
"""Pods or objects that are named; for more, the number is given."""
FIELD: Final = "spec.runPolicy.forceCoordinatorAfterSeconds"
STATUS_FIELD: Final = "journalLockShared"


def force_after(job: RLHFJob, status: Mapping[str, Any]) -> timedelta | None:
    """Return the time beyond its grace period after which a coordinator on a lost node is deleted by force.

    None: never.
    """
    seconds = job.spec.run_policy.force_coordinator_after_seconds
    return timedelta(seconds=seconds) if seconds is not None and status.get(STATUS_FIELD) is True else None


def overdue_deletions(
    pods: Iterable[ObservedPod], now: datetime, coordinator_after: timedelta | None
) -> list[PodDeletion]:
    """Return forced deletions of pods that are overdue, and faster ones of pods whose worker has ended.

    `coordinator_after` is `force_after`.
    """
    deletions, listed = [], list(pods)
    for pod in listed:
        time = _earliest(force_time(pod, coordinator_after), farewell_time(pod, listed))
        if time is not None and now > time:
            deletions.append(PodDeletion(pod.name, pod.uid, force=True))
        elif pod.deletion is not None and pod.lingers and pod.grace > SIDECAR_GRACE_SECONDS:
            deletions.append(PodDeletion(pod.name, pod.uid, grace=SIDECAR_GRACE_SECONDS))
    return deletions


def next_overdue(pods: Iterable[ObservedPod], now: datetime, coordinator_after: timedelta | None) -> float | None:
    """Return the seconds until another deletion is overdue or its delay is reported; None if that will not happen."""
    listed = list(pods)
    times = [
        time
        for pod in listed
        for time in (force_time(pod, coordinator_after), _late_time(pod), farewell_time(pod, listed))
        if time is not None
    ]
    return min(((time - now).total_seconds() + 1 for time in times if now <= time), default=None)


def force_time(pod: ObservedPod, coordinator_after: timedelta | None) -> datetime | None:
    """Return when a pod in deletion may be deleted by force; None: never, or it was already requested."""
    asked = pod.deletion_asked
    if pod.deletion is None or asked is None or pod.grace == 0:
        return None
    if pod.done:
        ended = pod.end.at if pod.end is not None and pod.end.at is not None else pod.deletion
        return max(pod.deletion, ended + timedelta(seconds=SIDECAR_GRACE_SECONDS)) + FORCE_AFTER
    if pod.group is Group.COORDINATOR:
        return None if coordinator_after is None or pod.ready else pod.deletion + coordinator_after
    grace = pod.deletion if pod.ready else min(pod.deletion, asked + timedelta(seconds=WORKER_GRACE_SECONDS))
    return grace + FORCE_AFTER


def _earliest(*times: datetime | None) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def farewell_time(pod: ObservedPod, pods: Iterable[ObservedPod]) -> datetime | None:
    """Return the time by which a coordinator counts as ended although another container of its pod runs; else None."""
    asked = pod.deletion_asked
    if pod.group is not Group.COORDINATOR or asked is None or pod.grace == 0:
        return None
    if pod.ready or pod.done or not pod.accompanied:
        return None
    ends = [worker.end if worker.done else None for worker in pods if worker.group is not Group.COORDINATOR]
    times = [end.at for end in ends if end is not None and end.code == ExitCode.OK and end.at is not None]
    if not ends or len(times) < len(ends) or min(times) < asked:
        return None
    return max(times) + FAREWELL


def _late_time(pod: ObservedPod) -> datetime | None:
    """Return the time after which the node of a coordinator counts as lost; None: never."""
    if pod.deletion is None or pod.group is not Group.COORDINATOR or pod.ready or pod.over or pod.finalizers:
        return None
    return pod.deletion + FORCE_AFTER


def unreadable_deletions(unreadable: Iterable[tuple[str, UnreadableObject]]) -> list[PodDeletion]:
    """Return deletions of the job's unreadable pods, for a job whose pods all end. `unreadable`: (kind, object)."""
    pods = (pod for kind, pod in unreadable if kind == "Pod")
    return [PodDeletion(pod.name, pod.uid) for pod in pods if not pod.going]


def lock_status(job: RLHFJob, status: Mapping[str, Any], reading: CoordinatorReading | None) -> dict[str, bool]:
    """Return the status field of the journal's lock, as last reported; empty if the job does not need it or none was
    reported.
    """
    if job.spec.run_policy.force_coordinator_after_seconds is None:
        return {}
    if reading is not None:
        return {STATUS_FIELD: reading.lock_shared}
    return {STATUS_FIELD: bool(status[STATUS_FIELD])} if STATUS_FIELD in status else {}


def unanswered_messages(
    job: RLHFJob,
    pods: Iterable[ObservedPod],
    status: Mapping[str, Any],
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[str]:
    """Return messages about a coordinator whose node does not respond."""
    messages = []
    for pod in pods:
        late = _late_time(pod)
        if late is None or now <= late:
            continue
        lost = f"the node of {pod.name} does not carry out its deletion"
        by_hand = f"if that node is gone permanently, `kubectl delete node` or `kubectl delete pod {pod.name} --force`"
        if job.spec.run_policy.force_coordinator_after_seconds is None:
            messages.append(f"{lost}: {by_hand}, or set {FIELD}")
        elif (time := force_time(pod, force_after(job, status))) is not None:
            messages.append(f"{lost}: it is deleted by force at {rfc3339(time)} ({FIELD})")
        else:
            doubt = (reading.lock_doubt if reading is not None else "") or "its coordinator never said that they do"
            why = f"{FIELD} is ignored, because other nodes may not see its journal's lock ({doubt})"
            messages.append(f"{lost}, and {why}: {by_hand}")
    return messages


def finalizer_messages(pods: Iterable[ObservedPod], others: Iterable[DeletedObject], now: datetime) -> list[str]:
    """Return messages about deleted pods and other objects that finalizers of others delay.

    Objects with the same finalizers share a sentence.
    """
    by_finalizers: dict[tuple[str, ...], list[str]] = {}
    for name, finalizers, time in _delayed_objects(pods, others):
        if now >= time:
            by_finalizers.setdefault(finalizers, []).append(name)
    return [
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''} "
        f"cannot be removed: {describe_finalizers(finalizers)}"
        for finalizers, names in by_finalizers.items()
    ]


def next_kept(pods: Iterable[ObservedPod], others: Iterable[DeletedObject], now: datetime) -> float | None:
    """Return the seconds until a delaying finalizer is reported; None if none will be."""
    times = [time for _, _, time in _delayed_objects(pods, others)]
    return min(((time - now).total_seconds() for time in times if now < time), default=None)


def _delayed_objects(
    pods: Iterable[ObservedPod], others: Iterable[DeletedObject]
) -> Iterator[tuple[str, tuple[str, ...], datetime]]:
    """Yield name, finalizers, and report time of deleted objects that still have finalizers."""
    for pod in sorted(pods, key=lambda pod: (pod.group, pod.index)):
        if pod.finalizers and pod.deletion is not None:
            yield pod.name, pod.finalizers, pod.deletion + FINALIZER_PATIENCE
    for other in others:
        yield f"{other.kind} {other.name}", other.finalizers, other.deleted + FINALIZER_PATIENCE


def forced_events(deletions: Iterable[PodDeletion], pods: Iterable[ObservedPod]) -> tuple[JobEvent, ...]:
    """Return an event for each pod of a coordinator that is deleted by force."""
    forced, listed = {deletion.uid for deletion in deletions if deletion.force}, list(pods)
    return tuple(
        JobEvent("CoordinatorForced", f"{pod.name} is deleted by force: {_why_forced(pod, listed)}", warning=True)
        for pod in listed
        if pod.uid in forced and pod.group is Group.COORDINATOR
    )


def _why_forced(pod: ObservedPod, pods: Iterable[ObservedPod]) -> str:
    if farewell_time(pod, pods) is None:
        return f"its node does not answer ({FIELD})"
    return (
        "its worker has released all others and has ended, but another container of the pod ignores its request to end"
    )
