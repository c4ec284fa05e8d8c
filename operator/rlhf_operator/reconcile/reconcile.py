"""`reconcile(job, observed, now)`: decides what happens to an RLHFJob; read it from the top.

Rule: pure and level-triggered: the plan depends on the arguments alone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from rlhf_common.conditions import ConditionType, PlannedReason, RunningReason
from rlhf_common.names import Group
from rlhf_operator.reconcile import (
    api_failure,
    conditions,
    device_plan,
    finalizer,
    forced_deletion,
    job_status,
    lifecycle,
    migration_pool,
    phases,
)
from rlhf_operator.reconcile.conditions import ConditionUpdate, StoredConditions
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.diagnostics import unreadable_objects
from rlhf_operator.reconcile.failures import failure_counter, pod_back_off
from rlhf_operator.reconcile.failures.failure_counter import FailureCounts
from rlhf_operator.reconcile.gang_admission import admit_gang, admitted_condition, queue_report, withdrawn_objects
from rlhf_operator.reconcile.observed.observed_job import ObservedJob
from rlhf_operator.reconcile.parsed_job import managed_elsewhere, parse_job
from rlhf_operator.reconcile.phases import PhaseActions
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PoolLabel, ReconcilePlan, deletions
from rlhf_operator.reconcile.revisions.pinning import PinnedJob, pin_revision
from rlhf_operator.reconcile.rollout import restarting_condition
from rlhf_operator.reconcile.scaling import resizing_condition
from rlhf_operator.reconcile.timestamps import rfc3339, soonest

Json = dict[str, Any]


def reconcile(stored: Mapping[str, Any], observed: ObservedJob, now: datetime) -> ReconcilePlan:
    """Return the plan for the stored RLHFJob."""
    if managed_elsewhere(stored):
        return ReconcilePlan()
    return api_failure.tell(_plan(stored, observed, now), stored, observed.api_failure)


def _plan(stored: Mapping[str, Any], observed: ObservedJob, now: datetime) -> ReconcilePlan:
    """Return the plan without the message about failed requests to the API server."""
    if stored["metadata"].get("deletionTimestamp"):
        return finalizer.plan_of_deletion(stored, observed, now)
    stored = device_plan.with_sizes(stored, observed)
    pinned = pin_revision(parse_job(stored), stored, observed)
    pinned, gang = admit_gang(pinned, stored, observed)
    if pinned.planned and observed.dry_run_problem and not pinned.settled:
        pinned = replace(pinned, problem=observed.dry_run_problem, reason=PlannedReason.REFUSED)
    if pinned.job is None:
        return _refuse_manifest(stored, pinned, now)
    context = ReconcileContext.for_job(stored, pinned, gang, observed, now)
    plan = phases.clean_up(context) if context.finished else _advance(context)
    return replace(plan, finalizer=finalizer.finalizer_change(stored, context.job, finished=context.finished))


def _advance(context: ReconcileContext) -> ReconcilePlan:
    """Return the plan of a job that is not finished."""
    failures = _count_failures(context)
    actions = phases.actions_of_phase(context, failures)
    groups = job_status.groups_status(
        context.sizes, context.pods, context.reading, context.status, failures, actions.versions
    )
    updates = _conditions(context, failures, actions, groups)
    merged = conditions.merged(context.conditions, updates, context.now, context.generation)
    status, status_events = _status(context, failures, actions, groups, conditions.written(merged))
    events = (
        *failures.events,
        *conditions.transition_events(context.conditions, merged),
        *status_events,
        *_unreadable_events(context),
    )
    return _write_when_due(context, _with_gang(context, actions), status, events)


def _count_failures(context: ReconcileContext) -> FailureCounts:
    """Return the counts with the new ends of pods."""
    return failure_counter.count_failures(
        context.status.get("restarts") or {},
        context.pods_with_ended,
        context.job.spec.run_policy,
        context.now,
        context.now if context.stopping else context.started,
        stopping=context.stopping,
        lost=context.lost,
    )


def _conditions(
    context: ReconcileContext, failures: FailureCounts, actions: PhaseActions, groups: list[Json]
) -> list[ConditionUpdate]:
    """Return the observed conditions."""
    updates = [lifecycle.planned(context)]
    if context.pinned.planned:
        updates.append(admitted_condition(context.job, context.gang, context.observed, context.leaves_queue))
    updates += actions.conditions
    if actions.finished or context.stopping:
        return updates
    [running] = [update.reason for update in actions.conditions if update.type is ConditionType.RUNNING]
    groups_before = context.status.get("groups") or []
    limited = context.gang.gate.limited if context.gang.gate is not None else ""
    updates.append(resizing_condition(context.conditions, running, groups_before, groups, context.pods, limited))
    restarting = restarting_condition(context.conditions, actions.versions, groups, context.pods, failures.restarts)
    return updates if restarting is None else [*updates, restarting]


def _status(
    context: ReconcileContext, failures: FailureCounts, actions: PhaseActions, groups: list[Json], entries: list[Json]
) -> tuple[Json, tuple[JobEvent, ...]]:
    """Return the whole status and the events about its changes. `entries`: `status.conditions`."""
    job, before, reading = context.job, context.status, context.reading
    # A finished job counts no further failures.
    accounted = {} if actions.finished else failures.with_deleted(actions.leaving)
    back_offs = {} if actions.finished else actions.back_offs
    status: Json = {
        "conditions": entries,
        "algorithm": job.spec.algorithm.name,
        "groups": groups,
        "scale": job_status.scale_status(job, context.pods),
        "restarts": failures.status(accounted, pod_back_off.written(back_offs)),
    }
    if context.generation is not None:
        status["observedGeneration"] = context.generation
    if actions.started is not None:
        status["startTime"] = rfc3339(actions.started)
        if revision := context.pinned.status if context.pinned.planned else before.get("revision"):
            status["revision"] = dict(revision)
    if context.start_back_off is not None and not actions.finished and not job.spec.suspend:
        status["release"] = context.start_back_off.written()
    if actions.finished:
        status["completionTime"] = rfc3339(context.now)
    pods, iterations, events = [*context.pods, *context.observed.ended], job.spec.iterations, list[JobEvent]()
    earlier = context.observed.reading
    last = job_status.last_reading(reading, pods, iterations, over=actions.finished, earlier=earlier)
    devices = device_plan.recorded(context.stored, reading, awaits_plan=job.spec.awaits_plan)
    status |= job_status.coordinator_status(last, reading, before, devices)
    if last is not None:
        events += job_status.skipped_steps_events(status["progress"], before.get("progress") or {})
        events += job_status.sample_failure_events(status["progress"], before.get("progress") or {})
        events += job_status.lost_tracker_events(status["progress"], before.get("progress") or {})
        events += job_status.warning_events(status["progress"], before.get("progress") or {})
    plans = status.get("plan") or {}, before.get("plan") or {}
    events += job_status.device_plan_events(*plans)
    if reading is not None:
        events += job_status.speculation_events(*plans)
        generation = context.sizes.get(Group.GENERATION, 0)
        status["migrationPool"], pool_events = migration_pool.pool_status(reading, generation, before, context.now)
        events += pool_events
    status |= forced_deletion.lock_status(job, before, reading)
    if failures.complete:
        status["progress"] = job_status.completed_progress(status.get("progress"), iterations, context.now)
    return status, tuple(events)


def _with_gang(context: ReconcileContext, actions: PhaseActions) -> ReconcilePlan:
    """Return the plan of the phase with its deletions and with the changes of gang and queue objects."""
    plan = replace(actions.plan, delete=(*deletions(actions.leaving), *actions.plan.delete))
    if actions.finished:
        return plan
    asked, given_back = (context.job, context.gang, context.observed), bool(context.leaves_queue)
    withdrawn = withdrawn_objects(*asked, given_back=given_back)
    return replace(plan, withdraw=withdrawn, report=queue_report(*asked, given_back=given_back))


def _write_when_due(
    context: ReconcileContext, plan: ReconcilePlan, status: Json, events: Iterable[JobEvent]
) -> ReconcilePlan:
    """Return the plan with the status, its events and the pool labels, if they are due."""
    written = context.observed.status_written
    age = math.inf if written is None else (context.now - written).total_seconds()
    if not job_status.differs(status, context.status):
        labels = _pool_labels(context, plan)
        if labels and (left := job_status.PROGRESS_SECONDS - age) > 0:
            return replace(plan, requeue_after=soonest((plan.requeue_after, left)))
        return replace(plan, labels=labels)
    hold_seconds = job_status.seconds_to_hold(status, context.status, age)
    if hold_seconds is not None:
        return replace(plan, requeue_after=soonest((plan.requeue_after, hold_seconds)))
    return replace(plan, status=status, events=(*plan.events, *events), labels=_pool_labels(context, plan))


def _pool_labels(context: ReconcileContext, plan: ReconcilePlan) -> tuple[PoolLabel, ...]:
    reading = context.reading
    if reading is None or context.now - reading.at > lifecycle.READING_VALID_FOR:
        return ()
    deleted = {deletion.uid for deletion in plan.delete}
    return migration_pool.pool_labels(context.job, (pod for pod in context.pods if pod.uid not in deleted), reading)


def _unreadable_events(context: ReconcileContext) -> list[JobEvent]:
    """Return an event for each message about unreadable objects that the stored status does not have."""
    said = "\n".join(condition["message"] for condition in context.status.get("conditions") or [])
    messages = unreadable_objects(context.observed)
    return [JobEvent("Unreadable", message, warning=True) for message in messages if message not in said]


def _refuse_manifest(stored: Mapping[str, Any], pinned: PinnedJob, now: datetime) -> ReconcilePlan:
    """Return the plan of an unreadable manifest: running pods continue unchanged until it is corrected."""
    before: Mapping[str, Any] = stored.get("status") or {}
    stored_conditions, generation = StoredConditions.from_status(before), stored["metadata"].get("generation")
    updates = [ConditionUpdate(ConditionType.PLANNED, False, pinned.reason, pinned.problem)]
    if stored_conditions.reason(ConditionType.RUNNING) == RunningReason.PENDING:
        updates.append(lifecycle.nothing_started(pinned.problem))
    merged = conditions.merged(stored_conditions, updates, now, generation)
    status = dict(before) | {"conditions": conditions.written(merged)}
    if generation is not None:
        status["observedGeneration"] = generation
    if status == before:
        return ReconcilePlan()
    return ReconcilePlan(status=status, events=tuple(conditions.transition_events(stored_conditions, merged)))
