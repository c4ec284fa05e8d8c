"""A job whose deletion is asked for, and the finalizer that makes the deletion wait for a last checkpoint.

Rule: pure. There is a finalizer only where spec.checkpoints.onDeletion asks for one, and only while the job is not
finished; every other deletion is the garbage collector's, and needs no running operator. The wait ends when the
coordinator's pod has ended, and at the latest at the deadline, so a lost node holds up a namespace for minutes and not
for ever. A manifest that cannot be read any more changes none of this: only the two fields that a deletion needs are
looked at. An operator that is not there can not let go: docs/operations.md says how to do it by hand.
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
"""Seconds a last checkpoint may take at most, as for the field: a deletion does not wait longer, whatever it says."""


def held(stored: Mapping[str, Any]) -> bool:
    """Return whether the job carries our finalizer."""
    return names.FINALIZER in (stored["metadata"].get("finalizers") or [])


def finalizer_change(stored: Mapping[str, Any], job: RLHFJob, *, finished: bool) -> bool | None:
    """Return whether the finalizer is to be set (True) or taken away (False); None: it is as it should be."""
    checkpoints = job.spec.checkpoints
    wanted = not finished and checkpoints is not None and checkpoints.on_deletion == "Save"
    return None if wanted == held(stored) else wanted


def plan_of_deletion(stored: Mapping[str, Any], observed: ObservedJob, now: datetime) -> ReconcilePlan:
    """Return what is to be done for a job whose deletion is asked for."""
    if not held(stored):
        return ReconcilePlan()  # its children go with it
    known = StoredConditions.of(stored.get("status") or {})
    asked, seconds = time_of(stored["metadata"]["deletionTimestamp"]), _deadline_seconds(stored)
    finished = known.holds(ConditionType.COMPLETE) or known.holds(ConditionType.FAILED)
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
    conditions = merged(known, [update], now, stored["metadata"].get("generation"))
    before: Mapping[str, Any] = stored.get("status") or {}
    status = dict(before) | {"conditions": written(conditions)}
    return ReconcilePlan(
        status=None if status == before else status,
        events=() if status == before else tuple(transition_events(known, conditions)),
        delete=deletions(pod for pod in coordinators if pod.active),
        requeue_after=(min([deadline, *gone]) - now).total_seconds(),
    )


def _deadline_seconds(stored: Mapping[str, Any]) -> int | None:
    """Return `spec.checkpoints.deletionDeadlineSeconds` of an object that may be malformed; None: nothing is saved."""
    spec = stored.get("spec")
    checkpoints = spec.get("checkpoints") if isinstance(spec, Mapping) else None
    if not isinstance(checkpoints, Mapping):
        return None
    seconds = checkpoints.get("deletionDeadlineSeconds")
    return seconds if isinstance(seconds, int) and 1 <= seconds <= DEADLINE_MAX else DEADLINE_MAX
