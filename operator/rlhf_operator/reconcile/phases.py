"""The actions of each phase of a job's life: changes of pods and objects, and conditions. Rule: pure.

A job that stops deletes its coordinator's pod first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rlhf_common.conditions import ConditionType, FinishedReason, RunningReason
from rlhf_common.names import Group
from rlhf_operator.gang.apis import kind_of
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.rendering import plain
from rlhf_operator.reconcile import diagnostics, forced_deletion, lifecycle, rollout, scaling
from rlhf_operator.reconcile.conditions import ConditionUpdate, merged, written
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.failures import hung_workers, pod_back_off, start_back_off
from rlhf_operator.reconcile.failures.failure_counter import FailureCounts
from rlhf_operator.reconcile.failures.pod_back_off import PodBackOff
from rlhf_operator.reconcile.gang_admission import gang_objects
from rlhf_operator.reconcile.last_applied import with_fingerprint
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import PodDeletion, ReconcilePlan, deletions
from rlhf_operator.reconcile.rollout import DesiredVersions
from rlhf_operator.reconcile.timestamps import rfc3339, seconds_until, soonest

Json = dict[str, Any]

REFUSED_RETRY_SECONDS: Final = 15.0
"""Seconds until a reconcile when the API server refuses an object (quota), a name is taken, or the gang blocks pods."""
DRY_RUN_RETRY_SECONDS: Final = 300.0
"""Seconds between dry runs of a refused template; an edited job is tried at once."""
MAX_PODS_PER_RECONCILE: Final = 250
"""Most pods that one plan creates, so that other jobs are reconciled in between."""


@dataclass(frozen=True)
class PhaseActions:
    """The actions of a phase."""

    conditions: tuple[ConditionUpdate, ...]
    versions: DesiredVersions
    """The versions from which the pods should be created."""
    plan: ReconcilePlan = field(default_factory=ReconcilePlan)
    """The plan without the status and without the deletions of `leaving`."""
    leaving: tuple[ObservedPod, ...] = ()
    """Pods to delete whose ends are intended, so that they count as no failures."""
    started: datetime | None = None
    """`status.startTime`."""
    back_offs: Mapping[str, PodBackOff] = field(default_factory=dict)
    """Pod name -> back-off, also of pods that exist again."""
    finished: bool = False


def actions_of_phase(context: ReconcileContext, failures: FailureCounts) -> PhaseActions:
    """Return the actions of the job's current phase. Completion precedes failure, and failure precedes stopping."""
    deadline = lifecycle.deadline(context.job, context.started)
    over = deadline is not None and deadline <= context.now and (context.backs_off or not context.stopping)
    if failures.complete:
        return _finish(context, lifecycle.completed(context.job.spec.iterations))
    if failures.failed is not None:
        return _finish(context, lifecycle.failed(*failures.failed))
    if deadline is not None and over:
        message = f"spec.runPolicy.activeDeadlineSeconds is over since {rfc3339(deadline)}"
        return _finish(context, lifecycle.failed(FinishedReason.DEADLINE, message))
    if context.stopping:
        return _stop(context)
    return _run(context, failures, deadline)


def clean_up(context: ReconcileContext) -> ReconcilePlan:
    """Return the plan of a finished job: end running pods and keep ended ones, until the job expires."""
    expiry = lifecycle.expiry(context.job, context.status)
    if expiry is not None and expiry <= context.now:
        return ReconcilePlan(delete_job=True)
    active = [pod for pod in context.pods if pod.active or _lingers(pod)]
    queue = context.observed.queue
    report = None
    if queue is not None and not active:
        message = context.conditions.message(ConditionType.RUNNING)
        report = queue.finished_report(message, succeeded=context.conditions.holds(ConditionType.COMPLETE))
    waits = (_next_overdue(context), seconds_until(expiry, context.now))
    return ReconcilePlan(
        status=_finished_status(context),
        delete=(*deletions(active), *_overdue(context), *_unreadable(context)),
        report=report,
        requeue_after=soonest(waits),
    )


def _finished_status(context: ReconcileContext) -> Json | None:
    """Return the status of a finished job with the pods that remain; None if it is up to date."""
    conditions, stays = context.conditions, _staying(context)
    complete = conditions.holds(ConditionType.COMPLETE)
    outcome = conditions.message(ConditionType.COMPLETE if complete else ConditionType.FAILED).partition("\n")[0]
    said = conditions.message(ConditionType.RUNNING)
    if not stays and not said.startswith(f"{outcome}. "):
        return None
    reason = RunningReason.COMPLETE if complete else RunningReason.FAILED
    update = ConditionUpdate(ConditionType.RUNNING, False, reason, ". ".join([outcome, *stays]))
    entries = merged(conditions, [update], context.now, context.generation)
    return (
        None
        if entries[ConditionType.RUNNING]["message"] == said
        else {**context.status, "conditions": written(entries)}
    )


def _finish(context: ReconcileContext, conditions: tuple[ConditionUpdate, ...]) -> PhaseActions:
    """Return the actions of a job that completes or fails: pods that have not ended are deleted."""
    leaving = tuple(pod for pod in context.pods if pod.active or _lingers(pod))
    return PhaseActions(conditions, context.versions(), leaving=leaving, started=context.started, finished=True)


def _lingers(pod: ObservedPod) -> bool:
    """Return whether a pod still runs although its worker has ended and its deletion is not requested."""
    return pod.lingers and pod.deletion is None


def _stop(context: ReconcileContext) -> PhaseActions:
    """Return the actions of a job that is suspended, is not admitted, or releases its resources for a while."""
    job, gang, back_off = context.job, context.gang, context.start_back_off
    coordinators = [pod for pod in context.pods if pod.group == Group.COORDINATOR and not pod.over]
    stopping = lifecycle.Stopping(
        pods_left=not all(pod.over for pod in context.pods),
        saves=job.spec.checkpoints is not None and any(pod.running is not None for pod in coordinators),
        stays=_staying(context),
    )
    apply: list[Json] = []
    if back_off is not None and context.backs_off and not job.spec.suspend:
        conditions = lifecycle.backing_off(". ".join([back_off.message(), *stopping.stays]))
    elif gang.gate is None or job.spec.suspend:
        conditions = lifecycle.suspended(job, stopping)
    else:
        conditions = lifecycle.queued(job, gang.gate, stopping)
        apply = gang_objects(job, gang, context.observed)
    overdue = (*_overdue(context), *_unreadable(context))
    held_up = context.write_refused or gang.blocked
    waits = (
        _next_overdue(context),
        seconds_until(back_off.until, context.now) if back_off is not None and context.backs_off else None,
        REFUSED_RETRY_SECONDS if held_up else None,
    )
    plan = ReconcilePlan(
        apply=tuple(map(with_fingerprint, apply)),
        delete=overdue,
        events=forced_deletion.forced_events(overdue, context.pods),
        requeue_after=soonest(waits),
    )
    leaving = tuple(pod for pod in coordinators or context.pods if pod.deletion is None)
    started = context.started if context.pods or context.backs_off else None
    # A queue has its own back-off, and a job that its user suspended starts without one.
    back_offs = {} if job.spec.suspend else pod_back_off.stored_back_offs(context.status)
    return PhaseActions(conditions, context.versions(), plan, leaving, started, back_offs)


def _run(context: ReconcileContext, failures: FailureCounts, deadline: datetime | None) -> PhaseActions:
    """Return the actions of a job that should run: delete leaving, hung and outdated pods, and create missing ones."""
    now, reading = context.now, context.reading
    versions = context.versions(failures.restarts.keys())
    leaving = _leaving(context, versions)
    back_offs = _back_offs(context, failures, versions, leaving)
    apply, issue = _objects_to_apply(context, versions, back_offs)
    waits = pod_back_off.waiting_messages(back_offs, now)
    waits += _staying(context)
    hung = [pod for pod in context.pods if pod.uid in context.lost]
    overdue = _overdue(context)
    plan = ReconcilePlan(
        resize=scaling.resize_request(reading, context.sizes) if context.coordinator_runs else None,
        apply=apply,
        delete=(*(PodDeletion(pod.name, pod.uid, grace=hung_workers.GRACE_SECONDS) for pod in hung), *overdue),
        events=forced_deletion.forced_events(overdue, context.pods),
        issue_certificates=issue,
        requeue_after=_requeue_after(context, versions, deadline, back_offs, len(apply)),
    )
    started = now if apply and context.started is None else context.started
    return PhaseActions(lifecycle.running(context, waits), versions, plan, tuple(leaving), started, back_offs)


def _leaving(context: ReconcileContext, versions: DesiredVersions) -> list[ObservedPod]:
    """Return the pods to delete in a job that should run, without those that its coordinator has lost."""
    leaving = (
        *scaling.leaving_pods(context.sizes, context.pods, context.now),
        *rollout.replaced_pods(versions, context.sizes, context.pods, context.reading, context.now),
        *start_back_off.unable_to_start(context.job, context.pods, context.now),
    )
    return [pod for pod in {pod.name: pod for pod in leaving}.values() if pod.uid not in context.lost]


def _back_offs(
    context: ReconcileContext, failures: FailureCounts, versions: DesiredVersions, leaving: Iterable[ObservedPod]
) -> Mapping[str, PodBackOff]:
    """Return the back-offs that apply, without new ends of outdated pods."""
    ended = [pod for pod in context.pods_with_ended if not versions.outdated(pod)]
    accounted = failures.with_deleted(leaving)
    back_offs = pod_back_off.with_ends(context.status, ended, accounted, failures.messages, context.now)
    wanted = scaling.pod_groups(context.job)
    return pod_back_off.still_valid(back_offs, wanted, versions.hashes, context.observed.pods, context.now)


def _objects_to_apply(
    context: ReconcileContext, versions: DesiredVersions, back_offs: Mapping[str, PodBackOff]
) -> tuple[tuple[Json, ...], bool]:
    """Return the objects to apply, pods last, and whether to issue certificates before the pods."""
    job, observed, pinned = context.job, context.observed, context.pinned
    if not pinned.planned:
        return (), False
    expire = observed.certificates_expire
    issue = expire is None or expire <= context.now
    supporting = [*_outdated_objects(context), *gang_objects(job, context.gang, observed)]
    objects = [with_fingerprint(body) for body in supporting]
    missing: list[tuple[Group, int]] = []
    if expire is not None and not context.gang.blocked:
        taken = observed.pods.keys() | observed.taken | pod_back_off.waiting(back_offs, context.now).keys()
        missing = scaling.missing_pods(job, context.sizes, taken)[:MAX_PODS_PER_RECONCILE]
    revision = pinned.revision if missing else None
    if revision is not None:
        pods = (revision.pod(group, index, versions.epochs.get(group, 0)) for group, index in missing)
        objects += [context.gang.pod(job, pod) for pod in pods]
    return tuple(objects), issue


def _outdated_objects(context: ReconcileContext) -> list[Json]:
    """Return the objects that pods need and that are missing or outdated, without the Secret."""
    pinned, observed = context.pinned, context.observed
    # An object under deletion is used until it is gone, and then created again.
    going = {(deleted.kind, deleted.name) for deleted in observed.deleted}
    due = {key for key, fingerprint in pinned.fingerprints.items() if observed.applied.get(key) != fingerprint} - going
    if observed.stored_revision.packed and observed.stored_revision.packed != pinned.stored_revision.packed:
        due.add(("ConfigMap", identity.configuration_name(context.job)))
    bodies = plain(context.job, pinned.stored_revision.data, observed.home) if due else []
    return [body for body in bodies if (kind_of(body), body["metadata"]["name"]) in due]


def _requeue_after(
    context: ReconcileContext,
    versions: DesiredVersions,
    deadline: datetime | None,
    back_offs: Mapping[str, PodBackOff],
    applied: int,
) -> float | None:
    """Return the seconds until time alone may change the actions of a running job; None if it will not."""
    job, pods, now = context.job, context.pods, context.now
    return soonest(
        (
            seconds_until(deadline, now),
            _next_overdue(context),
            REFUSED_RETRY_SECONDS if context.write_refused or context.gang.blocked else None,
            DRY_RUN_RETRY_SECONDS if context.observed.dry_run_problem else None,
            0.0 if applied >= MAX_PODS_PER_RECONCILE and not context.write_refused else None,
            lifecycle.reading_expires(context),
            diagnostics.requeue_after(pods, context.reading, now),
            pod_back_off.requeue_after(back_offs, now),
            start_back_off.requeue_after(job, pods, context.reading, now),
            scaling.next_farewell(pods, now),
            rollout.requeue_after(versions, context.sizes, pods, context.reading, now),
            seconds_until(context.observed.certificates_expire, now),
            hung_workers.next_lost(job, pods, context.reading, now),
        )
    )


def _staying(context: ReconcileContext) -> list[str]:
    """Return messages about pods and other objects whose deletion does not end."""
    messages = forced_deletion.unanswered_messages(
        context.job, context.pods, context.status, context.reading, context.now
    )
    return [*messages, *forced_deletion.finalizer_messages(context.pods, context.observed.deleted, context.now)]


def _overdue(context: ReconcileContext) -> tuple[PodDeletion, ...]:
    return tuple(forced_deletion.overdue_deletions(context.pods, context.now, context.force_after))


def _next_overdue(context: ReconcileContext) -> float | None:
    return soonest(
        (
            forced_deletion.next_overdue(context.pods, context.now, context.force_after),
            forced_deletion.next_kept(context.pods, context.observed.deleted, context.now),
        )
    )


def _unreadable(context: ReconcileContext) -> tuple[PodDeletion, ...]:
    return tuple(forced_deletion.unreadable_deletions(context.observed.unreadable))
