"""Deletion of a job, and the finalizer that delays it for a last checkpoint. Rule: pure.

The wait ends with the coordinator's pod, at the latest at the deadline. Without a running operator, a user removes the
finalizer (docs/operations.md).
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.conditions import ConditionType, RunningReason
from rlhf_common.names import Group
from rlhf_operator.reconcile import forced_deletion
from rlhf_operator.reconcile.conditions import ConditionUpdate, StoredConditions, merged, transition_events, written
from rlhf_operator.reconcile.observed.observed_job import ObservedJob
from rlhf_operator.reconcile.reconcile_plan import JobEvent, ReconcilePlan, deletions
from rlhf_operator.reconcile.timestamps import rfc3339, time_of

DEADLINE_MAX: Final = 300
"""Longest time in seconds for a last checkpoint, as for the field; applies even if the stored value is larger."""


def has_finalizer(stored: Mapping[str, Any]) -> bool:
    """Return whether the job has our finalizer."""
    return names.FINALIZER in (stored["metadata"].get("finalizers") or [])


def finalizer_change(stored: Mapping[str, Any], job: RLHFJob, *, finished: bool) -> bool | None:
    """Return whether to add (True) or remove (False) the finalizer; None if nothing changes."""
    checkpoints = job.spec.checkpoints
    wanted = not finished and checkpoints is not None and checkpoints.on_deletion == "Save"
    return None if wanted == has_finalizer(stored) else wanted


def plan_of_deletion(stored: Mapping[str, Any], observed: ObservedJob, now: datetime) -> ReconcilePlan:
    """Return the plan for a job whose deletion is requested."""
    if not has_finalizer(stored):
        return ReconcilePlan()  # the garbage collector deletes its objects
    stored_conditions = StoredConditions.from_status(stored.get("status") or {})
    asked, seconds = time_of(stored["metadata"]["deletionTimestamp"]), _deadline_seconds(stored)
    finished = stored_conditions.holds(ConditionType.COMPLETE) or stored_conditions.holds(ConditionType.FAILED)
    pods = list(observed.pods.values())
    coordinators = [pod for pod in pods if pod.group == Group.COORDINATOR and not pod.over]
    gone = [time for pod in coordinators if (time := forced_deletion.farewell_time(pod, pods)) is not None]
    if any(now >= time for time in gone):
        return ReconcilePlan(finalizer=False)
    if asked is None or seconds is None or finished or not coordinators:
        return ReconcilePlan(finalizer=False)
    deadline = asked + timedelta(seconds=seconds)
    if now >= deadline:
        text = "the job is deleted without a last checkpoint: spec.checkpoints.deletionDeadlineSeconds is over"
        return ReconcilePlan(finalizer=False, events=(JobEvent("CheckpointMissed", text, warning=True),))
    message = f"the job is being deleted; the coordinator saves a checkpoint, until {rfc3339(deadline)} at most"
    update = ConditionUpdate(ConditionType.RUNNING, False, RunningReason.CHECKPOINTING, message)
    conditions = merged(stored_conditions, [update], now, stored["metadata"].get("generation"))
    before: Mapping[str, Any] = stored.get("status") or {}
    status = dict(before) | {"conditions": written(conditions)}
    return ReconcilePlan(
        status=None if status == before else status,
        events=() if status == before else tuple(transition_events(stored_conditions, conditions)),
        delete=deletions(pod for pod in coordinators if pod.active),
        requeue_after=(min([deadline, *gone]) - now).total_seconds(),
    )


def _deadline_seconds(stored: Mapping[str, Any]) -> int | None:
    """Return `spec.checkpoints.deletionDeadlineSeconds` of a possibly malformed object; None without checkpoints.

    A missing or invalid value counts as DEADLINE_MAX.
    """
    spec = stored.get("spec")
    checkpoints = spec.get("checkpoints") if isinstance(spec, Mapping) else None
    if not isinstance(checkpoints, Mapping):
        return None
    seconds = checkpoints.get("deletionDeadlineSeconds")
    return seconds if isinstance(seconds, int) and 1 <= seconds <= DEADLINE_MAX else DEADLINE_MAX
