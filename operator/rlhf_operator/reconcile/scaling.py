"""Decides which pods a job should have, which of its pods must leave, and the condition Resizing. Rule: pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import ConditionType, ResizingReason, RunningReason
from rlhf_common.names import ExitCode, Group
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.rendering import group_sizes
from rlhf_operator.reconcile.conditions import ConditionUpdate, StoredConditions
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

FAREWELL: Final = timedelta(seconds=15)
"""Time for which a worker that ended well is not replaced, because its coordinator may end too."""
LEAVING_SHOWN: Final = 3
"""Most pods that the condition names."""
_NOT_UP_YET: Final = frozenset({RunningReason.PENDING, RunningReason.STARTING, RunningReason.SUSPENDED})
_RESIZING: Final = frozenset({ResizingReason.SCALING_UP, ResizingReason.SCALING_DOWN})


def pod_places(job: RLHFJob, sizes: Mapping[Group, int] | None = None) -> Iterator[tuple[str, Group, int]]:
    """Yield (pod name, group, index) of every pod the job should have, in the order of their creation.

    `sizes`: pods of each group, if not what the job wants.
    """
    for group, count in (group_sizes(job) if sizes is None else sizes).items():
        for index in range(count):
            yield identity.pod_name(job, group, index), group, index


def pod_groups(job: RLHFJob) -> dict[str, Group]:
    """Return pod name -> group of every pod that the spec asks for."""
    return {name: group for name, group, _ in pod_places(job)}


def missing_pods(job: RLHFJob, sizes: Mapping[Group, int], taken: Collection[str]) -> list[tuple[Group, int]]:
    """Return (group, index) of every pod within `sizes` whose name is not `taken`."""
    return [(group, index) for name, group, index in pod_places(job, sizes) if name not in taken]


def leaving_pods(sizes: Mapping[Group, int], pods: Iterable[ObservedPod], now: datetime) -> list[ObservedPod]:
    """Return the pods to delete in a job that should run: beyond the group's size, ended, or delayed in a requested
    restart.
    """
    leaving = []
    for pod in sorted(pods, key=lambda pod: (pod.group, -pod.index)):
        excess = pod.index >= sizes.get(pod.group, 0)
        ended = pod.over and not _ended_well_lately(pod, now)
        if pod.deletion is None and (excess or ended or _waits_to_restart(pod)):
            leaving.append(pod)
    return leaving


def next_farewell(pods: Iterable[ObservedPod], now: datetime) -> float | None:
    """Return the seconds until a worker that ended well is replaced; None if there is none."""
    ends = [pod.end.at for pod in pods if pod.end and pod.end.at and _ended_well_lately(pod, now)]
    return min(((end + FAREWELL - now).total_seconds() for end in ends), default=None)


def resize_request(reading: CoordinatorReading | None, sizes: Mapping[Group, int]) -> dict[str, int] | None:
    """Return group -> workers for groups of which the coordinator wants another number; None if there are none."""
    if reading is None:
        return None
    changed = {
        group.value: sizes[group]
        for group in (Group.GENERATION, Group.INFERENCE)
        if group in sizes and reading.replicas.get(group, sizes[group]) != sizes[group]
    }
    return changed or None


def resizing_condition(
    stored: StoredConditions,
    running_reason: str,
    groups_before: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    pods: Iterable[ObservedPod],
    limited: str = "",
) -> ConditionUpdate:
    """Return the condition Resizing, from the previous and current sizes and the existing pods.

    `groups` is `status.groups`. `limited`: why the job lacks the size of its spec, or empty.
    """
    sizes = {group["name"]: group["desired"] for group in groups}
    leaving = sorted(pod.name for pod in pods if pod.index >= sizes.get(pod.group, 0))
    wanted_before = {group["name"]: group["desired"] for group in groups_before}
    # This includes shrinking jobs: another group may grow at the same time.
    goes_on = stored.reason(ConditionType.RESIZING) in _RESIZING
    joining = []
    for group in groups:
        grew = group["desired"] > wanted_before.get(group["name"], group["desired"])
        if (grew or goes_on) and group["ready"] < group["desired"]:
            joining.append(f"{group['ready']} of {group['desired']} {group['name']} workers are ready")
    if leaving:
        text = f"{len(leaving)} pods leave, and their samples go to others: {', '.join(leaving[:LEAVING_SHOWN])}"
        return ConditionUpdate(ConditionType.RESIZING, True, ResizingReason.SCALING_DOWN, text)
    if joining and running_reason not in _NOT_UP_YET:
        return ConditionUpdate(ConditionType.RESIZING, True, ResizingReason.SCALING_UP, "; ".join(joining))
    if limited:
        return ConditionUpdate(ConditionType.RESIZING, False, ResizingReason.LIMITED, limited)
    text = "all groups have the size that the spec asks for"
    return ConditionUpdate(ConditionType.RESIZING, False, ResizingReason.STABLE, text)


def _ended_well_lately(pod: ObservedPod, now: datetime) -> bool:
    """Return whether a worker ended with exit code 0 less than FAREWELL ago."""
    end = pod.end
    well = end is not None and end.code == ExitCode.OK and pod.group != Group.COORDINATOR
    return well and end is not None and end.at is not None and now - end.at < FAREWELL


def _waits_to_restart(pod: ObservedPod) -> bool:
    """Return whether a worker asked for its restart and the kubelet delays it as after a crash."""
    asked = pod.end is not None and pod.end.code == ExitCode.RESTART
    return asked and pod.waiting == "CrashLoopBackOff" and pod.group != Group.COORDINATOR
