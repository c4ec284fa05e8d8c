"""The Resizing condition, and what the coordinator is to be told: a group is on its way from one size to another.

Rule: pure. A job that starts is not being resized; a pod that is replaced is not either.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rlhf_api.conditions import ConditionType, ResizingReason, RunningReason
from rlhf_api.names import Group
from rlhf_operator.reconcile.conditions import Conditions
from rlhf_operator.reconcile.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed_pod import ObservedPod

_NOT_UP_YET: Final = frozenset({RunningReason.PENDING, RunningReason.STARTING, RunningReason.SUSPENDED})


def told(reading: CoordinatorReading | None, sizes: Mapping[Group, int]) -> dict[str, int] | None:
    """Group -> workers, of the groups of which the coordinator wants another number; None when there is none."""
    if reading is None:
        return None
    changed = {
        group.value: sizes[group]
        for group in (Group.GENERATION, Group.INFERENCE)
        if group in sizes and reading.replicas.get(group, sizes[group]) != sizes[group]
    }
    return changed or None


def resizing(
    conditions: Conditions,
    before: Mapping[str, Any],
    groups: list[dict[str, Any]],
    sizes: Mapping[Group, int],
    pods: Iterable[ObservedPod],
) -> None:
    """Sets Resizing from the sizes wanted before and now, and the pods that are there."""
    listed = list(pods)
    leaving = [pod.name for pod in listed if pod.index >= sizes.get(pod.group, 0)]
    wanted_before = {each["name"]: each["desired"] for each in before.get("groups") or []}
    # Also of one that shrinks: another group may grow at the same time.
    goes_on = conditions.reason(ConditionType.RESIZING) in (ResizingReason.SCALING_UP, ResizingReason.SCALING_DOWN)
    joining = []
    for each in groups:
        grew = each["desired"] > wanted_before.get(each["name"], each["desired"])
        if (grew or goes_on) and each["ready"] < each["desired"]:
            joining.append(f"{each['ready']} of {each['desired']} {each['name']} workers are ready")
    if leaving:
        text = f"{len(leaving)} pods leave, and their samples go to others: {', '.join(sorted(leaving)[:3])}"
        conditions.set(ConditionType.RESIZING, True, ResizingReason.SCALING_DOWN, text)
    elif joining and conditions.reason(ConditionType.RUNNING) not in _NOT_UP_YET:
        conditions.set(ConditionType.RESIZING, True, ResizingReason.SCALING_UP, "; ".join(joining))
    else:
        text = "all groups have the size that the spec asks for"
        conditions.set(ConditionType.RESIZING, False, ResizingReason.STABLE, text)
