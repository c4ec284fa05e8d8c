"""Which pods a running job should have, and which of those it has must go.

Rule: pure. A pod is named by its place in the job, so there is never a second one for a place: a pod that has ended is
deleted first and made again when its name is free. Pods that leave are those of the highest index. The coordinator is
never deleted by force, because a second one beside a first that is not really dead would write the same journal, unless
the job asks for it and the journal has a lock that keeps the two apart.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode, Group
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.pods import WORKER_GRACE_SECONDS
from rlhf_operator.manifests.render import workers
from rlhf_operator.reconcile.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import PodDeletion
from rlhf_operator.untrusted import UnreadableObject

FORCE_AFTER: Final = timedelta(seconds=30)
"""Beyond its grace: a kubelet that lives has answered by then, so the node is gone."""
FAREWELL: Final = timedelta(seconds=15)
"""A coordinator waits 5 s for its workers to go, and a kubelet may be slow to tell of its end."""


def desired(job: RLHFJob) -> dict[Group, int]:
    """Pods of each group, the coordinator first."""
    return {Group.COORDINATOR: 1} | {group: count for group, count, _ in workers(job)}


def places(job: RLHFJob) -> Iterator[tuple[str, Group, int]]:
    """(pod name, group, index) of every pod the job should have, in the order in which they are made."""
    for group, count in desired(job).items():
        for index in range(count):
            yield identity.pod_name(job, group, index), group, index


def names(job: RLHFJob) -> dict[str, Group]:
    """Pod name -> group of every pod the job should have."""
    return {name: group for name, group, _ in places(job)}


def missing(job: RLHFJob, taken: Collection[str]) -> list[tuple[Group, int]]:
    """Places whose pod name is free."""
    return [(group, index) for name, group, index in places(job) if name not in taken]


def leaving(job: RLHFJob, pods: Iterable[ObservedPod], now: datetime) -> list[ObservedPod]:
    """Pods to delete in a job that runs: beyond the group's size, ended, or in a back-off they do not deserve."""
    sizes = desired(job)
    found = []
    for pod in sorted(pods, key=lambda each: (each.group, -each.index)):
        excess = pod.index >= sizes.get(pod.group, 0)
        if pod.deletion is None and (excess or (pod.over and not _farewell(pod, now)) or _waits_to_restart(pod)):
            found.append(pod)
    return found


def _farewell(pod: ObservedPod, now: datetime) -> bool:
    """It ended well a moment ago: workers do when the last iteration is trained, and their coordinator after them."""
    end = pod.end
    well = end is not None and end.code == ExitCode.OK and pod.group != Group.COORDINATOR
    return well and end is not None and end.at is not None and now - end.at < FAREWELL


def next_farewell(pods: Iterable[ObservedPod], now: datetime) -> float | None:
    """Seconds until a worker that ended well is replaced after all."""
    left = [
        (pod.end.at + FAREWELL - now).total_seconds() for pod in pods if pod.end and pod.end.at and _farewell(pod, now)
    ]
    return min(left, default=None)


def _waits_to_restart(pod: ObservedPod) -> bool:
    """It asked for its restart, and the kubelet makes it wait longer each time, as if it had crashed."""
    asked = pod.end is not None and pod.end.code == ExitCode.RESTART
    return asked and pod.waiting == "CrashLoopBackOff" and pod.group != Group.COORDINATOR


def overdue(pods: Iterable[ObservedPod], now: datetime, force: timedelta | None = None) -> list[PodDeletion]:
    """Pods whose node does not carry out their deletion; the coordinator `force` after its grace, if at all."""
    return [
        PodDeletion(pod.name, pod.uid, force=True)
        for pod in pods
        if (due := due_of(pod, force)) is not None and now > due
    ]


def next_overdue(pods: Iterable[ObservedPod], now: datetime, force: timedelta | None = None) -> float | None:
    """Seconds until `overdue` may find another one."""
    left = [(due - now).total_seconds() + 1 for pod in pods if (due := due_of(pod, force)) is not None and now <= due]
    return min(left, default=None)


def due_of(pod: ObservedPod, force: timedelta | None = None) -> datetime | None:
    """When it may be deleted by force; None: not at all. A rank that is not ready is not staying for a checkpoint: its
    node is gone, or it never began. A coordinator that is ready has a node that answers."""
    asked = pod.deletion_asked
    if pod.deletion is None or asked is None:
        return None
    if pod.group is Group.COORDINATOR:
        return None if force is None or pod.ready else pod.deletion + force
    grace = pod.deletion if pod.ready else min(pod.deletion, asked + timedelta(seconds=WORKER_GRACE_SECONDS))
    return grace + FORCE_AFTER


def strangers(unreadable: Iterable[tuple[str, UnreadableObject]]) -> list[PodDeletion]:
    """Pods of the job that cannot be read, when no pod is to be left; `unreadable`: (kind, object)."""
    pods = (each for kind, each in unreadable if kind == "Pod")
    return [PodDeletion(each.name, each.uid) for each in pods if not each.going]
