"""Pods whose deletion does not end: when it is hastened or forced, and what the conditions say of those that stay.

A pod stays in deletion until its kubelet says that its processes have ended, which a lost node never does. A worker has
nothing that a second one would harm, so its pod is deleted by force after its grace. Of the coordinator only the user
decides that (spec.runPolicy.forceCoordinatorAfterSeconds), and even then only when the coordinator itself has said that
other nodes see the lock of its journal: that lock, and not the API server, keeps the next one from writing while a
first one lives on. What it said is kept in the status, as it cannot be asked any more.

A pod whose worker has ended is over: containers beside it get SIDECAR_GRACE_SECONDS, and a coordinator that has ended
writes no journal. A kubelet says nothing of a container's end, and takes no shorter grace, while it waits for the other
containers of a deleted pod. So the end of such a coordinator is known from its workers: it lets them go when its last
checkpoint is saved. The operator removes no finalizer of somebody else: the condition names it with the pod that it
keeps. The API server shows a forced deletion as a grace of 0, so that no pod is forced twice. Rule: pure.
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
"""Beyond a pod's grace: a kubelet that lives has answered by then, so the node is gone."""
FAREWELL: Final = timedelta(seconds=15)
"""From the end of the last worker to that of the coordinator: it waits 5 s for them, and closes its journal."""
FINALIZER_PATIENCE: Final = timedelta(seconds=10)
"""Time that whoever set a finalizer has after a pod's grace; a controller that runs takes it away within seconds."""
SHOWN: Final = 3
"""Pods that are named; of more, the number is said."""
FIELD: Final = "spec.runPolicy.forceCoordinatorAfterSeconds"
STATUS_FIELD: Final = "journalLockShared"


def force_after(job: RLHFJob, status: Mapping[str, Any]) -> timedelta | None:
    """Return how long beyond its grace the coordinator's pod is deleted by force; None: it is not."""
    seconds = job.spec.run_policy.force_coordinator_after_seconds
    return timedelta(seconds=seconds) if seconds is not None and status.get(STATUS_FIELD) is True else None


def overdue_deletions(
    pods: Iterable[ObservedPod], now: datetime, coordinator_after: timedelta | None
) -> list[PodDeletion]:
    """Return forced deletions of the pods whose node does not carry out their deletion, and hastened ones of pods whose
    worker has ended.

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
    """Return the seconds until another deletion is overdue, or its delay is worth a word; None: neither will be."""
    listed = list(pods)
    times = [
        time
        for pod in listed
        for time in (force_time(pod, coordinator_after), _late_time(pod), farewell_time(pod, listed))
        if time is not None
    ]
    return min(((time - now).total_seconds() + 1 for time in times if now <= time), default=None)


def force_time(pod: ObservedPod, coordinator_after: timedelta | None) -> datetime | None:
    """Return when a pod may be deleted by force; None: not at all, or that was asked for already.

    A rank that is not ready is not staying for a checkpoint: its node is gone, or it never began. A coordinator that is
    ready has a node that answers.
    """
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
    """Return after when a coordinator whose kubelet waits for other containers of its pod has ended for certain; None:
    its workers do not say so.

    It has let all of them go, well, since its deletion was asked for.
    """
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
    """Return after when the node of a coordinator counts as one that does not answer; None: it never does."""
    if pod.deletion is None or pod.group is not Group.COORDINATOR or pod.ready or pod.over or pod.finalizers:
        return None
    return pod.deletion + FORCE_AFTER


def unreadable_deletions(unreadable: Iterable[tuple[str, UnreadableObject]]) -> list[PodDeletion]:
    """Return deletions of the job's pods that cannot be read, for when no pod is to be left. `unreadable`: (kind,
    object)."""
    pods = (pod for kind, pod in unreadable if kind == "Pod")
    return [PodDeletion(pod.name, pod.uid) for pod in pods if not pod.going]


def lock_status(job: RLHFJob, status: Mapping[str, Any], reading: CoordinatorReading | None) -> dict[str, bool]:
    """Return what the status says of the journal's lock: what the coordinator said last, as long as it matters."""
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
    """Return what is said of a coordinator whose node does not answer."""
    messages = []
    for pod in pods:
        late = _late_time(pod)
        if late is None or now <= late:
            continue
        lost = f"the node of {pod.name} does not carry out its deletion"
        by_hand = f"when that node is gone for good, `kubectl delete node` or `kubectl delete pod {pod.name} --force`"
        if job.spec.run_policy.force_coordinator_after_seconds is None:
            messages.append(f"{lost}: {by_hand}, or set {FIELD}")
        elif (time := force_time(pod, force_after(job, status))) is not None:
            messages.append(f"{lost}: it is deleted by force at {rfc3339(time)} ({FIELD})")
        else:
            doubt = (reading.lock_doubt if reading is not None else "") or "its coordinator never said that they do"
            why = f"{FIELD} is not followed, as other nodes may not see its journal's lock ({doubt})"
            messages.append(f"{lost}, and {why}: {by_hand}")
    return messages


def finalizer_messages(pods: Iterable[ObservedPod], others: Iterable[DeletedObject], now: datetime) -> list[str]:
    """Return what is said of pods and other objects that are deleted and that finalizers of others keep.

    One sentence for everything that the same finalizers keep.
    """
    kept: dict[tuple[str, ...], list[str]] = {}
    for name, finalizers, time in _kept(pods, others):
        if now >= time:
            kept.setdefault(finalizers, []).append(name)
    return [
        f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''} cannot go: "
        f"{describe_finalizers(finalizers)}"
        for finalizers, names in kept.items()
    ]


def next_kept(pods: Iterable[ObservedPod], others: Iterable[DeletedObject], now: datetime) -> float | None:
    """Return the seconds until a finalizer that keeps something is worth a word; None: none will be."""
    times = [time for _, _, time in _kept(pods, others)]
    return min(((time - now).total_seconds() for time in times if now < time), default=None)


def _kept(
    pods: Iterable[ObservedPod], others: Iterable[DeletedObject]
) -> Iterator[tuple[str, tuple[str, ...], datetime]]:
    """Yield name, finalizers, and when nothing but these keeps it, of all that is deleted and has finalizers."""
    for pod in sorted(pods, key=lambda pod: (pod.group, pod.index)):
        if pod.finalizers and pod.deletion is not None:
            yield pod.name, pod.finalizers, pod.deletion + FINALIZER_PATIENCE
    for other in others:
        yield f"{other.kind} {other.name}", other.finalizers, other.deleted + FINALIZER_PATIENCE


def forced_events(deletions: Iterable[PodDeletion], pods: Iterable[ObservedPod]) -> tuple[JobEvent, ...]:
    """Return an event for a coordinator among pods that are deleted by force."""
    forced, listed = {deletion.uid for deletion in deletions if deletion.force}, list(pods)
    return tuple(
        JobEvent("CoordinatorForced", f"{pod.name} is deleted by force: {_why_forced(pod, listed)}", warning=True)
        for pod in listed
        if pod.uid in forced and pod.group is Group.COORDINATOR
    )


def _why_forced(pod: ObservedPod, pods: Iterable[ObservedPod]) -> str:
    if farewell_time(pod, pods) is None:
        return f"its node does not answer ({FIELD})"
    return "its worker has let all others go and has ended, and a container beside it does not end when it is asked to"
