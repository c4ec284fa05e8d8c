"""A coordinator on a node that does not answer: whether and when its pod is deleted by force, and what is said of it.

Its pod stays in deletion until its kubelet says that the process has ended, which a lost node never does. Rule: pure.
Nobody but the user decides that it is forced (spec.runPolicy.forceCoordinatorAfterSeconds), and even then only when the
coordinator itself has said that other nodes see the lock of its journal: that lock, and not the API server, keeps the
next one from writing beside a first that lives on. What it said is kept in the status, as it cannot be asked any more.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.names import Group
from rlhf_operator.reconcile import scaling
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PodDeletion

FIELD: Final = "spec.runPolicy.forceCoordinatorAfterSeconds"
STATUS: Final = "journalLockShared"


def after(job: RLHFJob, status: Mapping[str, Any]) -> timedelta | None:
    """Beyond its grace; None: it is not forced."""
    seconds = job.spec.run_policy.force_coordinator_after_seconds
    return timedelta(seconds=seconds) if seconds is not None and status.get(STATUS) is True else None


def kept(job: RLHFJob, before: Mapping[str, Any], reading: CoordinatorReading | None) -> dict[str, bool]:
    """What the status says of the lock: what the coordinator said last, as long as it matters."""
    if job.spec.run_policy.force_coordinator_after_seconds is None:
        return {}
    if reading is not None:
        return {STATUS: reading.lock_shared}
    return {STATUS: bool(before[STATUS])} if STATUS in before else {}


def told(
    job: RLHFJob,
    pods: Iterable[ObservedPod],
    status: Mapping[str, Any],
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[str]:
    """What is said of a coordinator whose node does not answer."""
    found = []
    for pod in pods:
        late = pod.deletion is not None and now > pod.deletion + scaling.FORCE_AFTER
        if pod.group is not Group.COORDINATOR or not late or pod.ready:
            continue
        lost = f"the node of {pod.name} does not carry out its deletion"
        by_hand = f"when that node is gone for good, `kubectl delete node` or `kubectl delete pod {pod.name} --force`"
        if job.spec.run_policy.force_coordinator_after_seconds is None:
            found.append(f"{lost}: {by_hand}, or set {FIELD}")
        elif (due := scaling.due_of(pod, after(job, status))) is not None:
            found.append(f"{lost}: it is deleted by force at {rfc3339(due)} ({FIELD})")
        else:
            doubt = (reading.lock_doubt if reading is not None else "") or "its coordinator never said that they do"
            why = f"{FIELD} is not followed, as other nodes may not see its journal's lock ({doubt})"
            found.append(f"{lost}, and {why}: {by_hand}")
    return found


def events(deletions: Iterable[PodDeletion], pods: Iterable[ObservedPod]) -> tuple[JobEvent, ...]:
    """Of a coordinator among pods that are deleted by force."""
    forced = {each.uid for each in deletions if each.force}
    return tuple(
        JobEvent(
            "CoordinatorForced", f"{pod.name} is deleted by force: its node does not answer ({FIELD})", warning=True
        )
        for pod in pods
        if pod.uid in forced and pod.group is Group.COORDINATOR
    )
