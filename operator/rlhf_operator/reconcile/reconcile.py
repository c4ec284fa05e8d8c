"""`reconcile(job, observed, now) -> Plan`: read from the top, this is the life of a job.

Rule: pure, level-triggered, idempotent: the answer follows from the state of the world alone, and once it is carried
out the same question is answered with an empty plan. Nothing is decided on an event. Time comes in as an argument, and
what time alone will change is answered as `look_again_after`, computed from times in the status, so a restart of the
operator loses nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rlhf_api.conditions import ConditionType, FinishedReason, PlannedReason, RunningReason
from rlhf_api.job import RLHFJob
from rlhf_api.names import Group
from rlhf_operator.gang.apis import kind_of
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.render import plain
from rlhf_operator.reconcile import (
    finalizer,
    forced_deletion,
    gang_admission,
    job_status,
    lifecycle,
    lost_workers,
    migration_pool,
    pod_back_off,
    pod_replacement,
    resize,
    scaling,
    start_back_off,
)
from rlhf_operator.reconcile.conditions import Conditions, rfc3339
from rlhf_operator.reconcile.diagnostics import requeue_after, unread
from rlhf_operator.reconcile.failure_counter import FailureCounts, count_failures
from rlhf_operator.reconcile.last_applied import with_fingerprint
from rlhf_operator.reconcile.observed_job import ObservedJob
from rlhf_operator.reconcile.observed_pod import PATIENCE, ObservedPod, time_of
from rlhf_operator.reconcile.parsed_job import ParsedJob, parse_job
from rlhf_operator.reconcile.pod_back_off import PodBackOff
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PodDeletion, PoolLabel, ReconcilePlan
from rlhf_operator.reconcile.revisions.pinning import PinnedJob, pin_revision

Json = dict[str, Any]

REFUSED_RETRY_SECONDS: Final = 15.0
"""Between attempts at what the API server refused (quota), or where a name is taken: somebody has to act, and then
waits for us."""
TRIAL_RETRY_SECONDS: Final = 300.0
"""Between dry runs of a template that the API server refuses; an edit of the job is tried at once."""

MAX_PODS_PER_RECONCILE: Final = 250
"""Pods one plan makes: 25 milliseconds of rendering, then other jobs have their turn."""


def reconcile(job: Mapping[str, Any], observed: ObservedJob, now: datetime) -> ReconcilePlan:
    """What is to be done for the stored RLHFJob `job`."""
    before: Mapping[str, Any] = job.get("status") or {}
    conditions = Conditions(before.get("conditions") or [], now, job["metadata"].get("generation"))
    if gang_admission.foreign(job):
        return ReconcilePlan()
    if job["metadata"].get("deletionTimestamp"):
        return finalizer.deleting(job, conditions, observed, now)
    admission, placed = gang_admission.admit_gang(pin_revision(parse_job(job), job, observed), observed)
    if admission.planned and observed.verdict and not admission.settled:
        admission = replace(admission, problem=observed.verdict, reason=PlannedReason.REFUSED)
    if admission.job is None:
        return _refused(job, conditions, admission, before)
    finished = conditions.holds(ConditionType.COMPLETE) or conditions.holds(ConditionType.FAILED)
    if finished:
        plan = _finished(admission.job, conditions, before, observed, now)
    else:
        plan = _Visit(job, admission, placed, conditions, before, observed, now).plan()
    return replace(plan, finalizer=finalizer.hold(job, admission.job, finished=finished))


def _refused(
    job: Mapping[str, Any], conditions: Conditions, admission: ParsedJob, before: Mapping[str, Any]
) -> ReconcilePlan:
    """Nothing can be read from the manifest, so what runs goes on as it is until the manifest is put right."""
    conditions.set(ConditionType.PLANNED, False, admission.reason, admission.problem)
    if conditions.reason(ConditionType.RUNNING) == RunningReason.PENDING:
        told = f"nothing was started: {admission.problem}"
        conditions.set(ConditionType.RUNNING, False, RunningReason.PENDING, told)
    written = dict(before) | {"conditions": conditions.written()}
    if (generation := job["metadata"].get("generation")) is not None:
        written["observedGeneration"] = generation
    return ReconcilePlan() if written == before else ReconcilePlan(status=written, events=tuple(conditions.events()))


def _finished(
    job: RLHFJob, conditions: Conditions, before: Mapping[str, Any], observed: ObservedJob, now: datetime
) -> ReconcilePlan:
    """What still runs is stopped, what has ended is kept for its logs, until the job is too old."""
    expiry = lifecycle.expiry(job, before)
    if expiry is not None and expiry <= now:
        return ReconcilePlan(delete_job=True)
    left = [each for each in observed.pods.values() if each.active]
    force = forced_deletion.after(job, before)
    overdue = [*scaling.overdue(observed.pods.values(), now, force), *scaling.strangers(observed.unreadable)]
    looks = [scaling.next_overdue(observed.pods.values(), now, force), _seconds(expiry, now)]
    told, succeeded = conditions.message(ConditionType.RUNNING), conditions.holds(ConditionType.COMPLETE)
    queue = None if left else observed.queue
    report = queue.finished_report(told, succeeded=succeeded) if queue is not None else None
    return ReconcilePlan(delete=(*_deletions(left), *overdue), report=report, requeue_after=_soonest(looks))


class _Visit:
    """One look at a job that is not finished."""

    def __init__(
        self,
        stored: Mapping[str, Any],
        admission: PinnedJob,
        placed: gang_admission.GangAdmission,
        conditions: Conditions,
        before: Mapping[str, Any],
        observed: ObservedJob,
        now: datetime,
    ) -> None:
        assert admission.job is not None
        self.job, self.admission, self.stored = admission.job, admission, stored
        self.placed = placed
        self.conditions, self.before, self.observed, self.now = conditions, before, observed, now
        self.pods = observed.pods
        self.started = time_of(before.get("startTime"))
        self.sizes = scaling.desired(self.job)
        self.wanted = self._of_now(())
        self.force = forced_deletion.after(self.job, before)
        self.generation = int(stored["metadata"].get("generation") or 0)
        self.release = start_back_off.known(before)
        if admission.planned and not self.resting:
            asked = self.job, self.pods, observed.reading, self.release, self.generation, now
            self.release = start_back_off.decided(*asked)
        going_on = admission.planned and not self.resting
        self.lost = lost_workers.lost(self.job, self.pods.values(), observed.reading, now) if going_on else {}
        self.told: tuple[JobEvent, ...] = ()
        """Events that belong to no condition."""
        self.places: Mapping[str, PodBackOff] = {}
        """Those whose pod ended lately."""

    def plan(self) -> ReconcilePlan:
        """The plan of this visit."""
        self._planned()
        accounts = self._accounts()
        deadline = lifecycle.deadline(self.job, self.started)
        if accounts.complete:
            lifecycle.completed(self.conditions, self.job.spec.iterations)
        elif accounts.verdict is not None:
            lifecycle.failed(self.conditions, *accounts.verdict)
        elif deadline is not None and deadline <= self.now and (self.released or not self.resting):
            told = f"spec.runPolicy.activeDeadlineSeconds is over since {rfc3339(deadline)}"
            lifecycle.failed(self.conditions, FinishedReason.DEADLINE, told)
        elif self.resting:
            return self._suspended(accounts)
        else:
            return self._running(accounts, deadline)
        ends = [each for each in self.pods.values() if each.active]
        return self._written(accounts, ends, ReconcilePlan(), completion=self.now)

    @property
    def resting(self) -> bool:
        """No pod is to be left, by its user's wish or its queue's, or because they cannot start."""
        return self.job.spec.suspend or self.placed.closed or self.released

    @property
    def released(self) -> bool:
        """The job gives everything back and waits."""
        return self.release is not None and self.release.holds(self.generation, self.now)

    @property
    def _refused(self) -> bool:
        """Something was not written the last time."""
        return bool(self.observed.refusals or self.observed.occupied)

    def _of_now(self, scopes: Iterable[str]) -> pod_replacement.DesiredVersions:
        marks = self.admission.hashes if self.admission.planned else {}
        return pod_replacement.wanted(self.job, self.sizes, self.before, scopes, marks)

    def _planned(self) -> None:
        warnings = f"; warning: {self.admission.warnings}" if self.admission.warnings else ""
        told = self.admission.problem or f"{self.admission.note or 'the manifest is valid'}{warnings}"
        self.conditions.set(ConditionType.PLANNED, self.admission.planned, self.admission.reason, told)
        if self.admission.planned:
            gang_admission.admitted(self.conditions, self.placed, self.job, self.observed)

    def _accounts(self) -> FailureCounts:
        policy, stopping = self.job.spec.run_policy, self.resting
        started = self.now if stopping else self.started
        known = self.before.get("restarts") or {}
        return count_failures(
            known, self._listed().values(), policy, self.now, started, stopping=stopping, lost=self.lost
        )

    def _listed(self) -> dict[str, ObservedPod]:
        """Uid -> pod, also of those that are gone; one that goes while the rest is observed is in both."""
        return {pod.uid: pod for pod in (*self.observed.ended, *self.pods.values())}

    def _suspended(self, accounts: FailureCounts) -> ReconcilePlan:
        apply: tuple[Json, ...] = ()
        if self.release is not None and self.released and not self.job.spec.suspend:
            leaving = lifecycle.released(self.conditions, self.job, self.release.told(), self.pods.values())
        elif self.placed.gate is None or self.job.spec.suspend:
            leaving = lifecycle.suspended(self.conditions, self.job, self.pods.values())
        else:
            leaving = gang_admission.waiting(self.conditions, self.job, self.placed.gate, self.pods.values())
            apply = tuple(map(with_fingerprint, gang_admission.gang_objects(self.job, self.placed, self.observed)))
        if not self.pods and not self.released:
            self.started = None
        # A queue has a back-off of its own; what its user suspended begins anew.
        self.places = {} if self.job.spec.suspend else pod_back_off.known(self.before)
        overdue = [
            *scaling.overdue(self.pods.values(), self.now, self.force),
            *scaling.strangers(self.observed.unreadable),
        ]
        look = scaling.next_overdue(self.pods.values(), self.now, self.force)
        held_up = self._refused or self.placed.blocked
        again = _seconds(self.release.until, self.now) if self.release is not None and self.released else None
        looks = [look, again, REFUSED_RETRY_SECONDS if held_up else None]
        told = forced_deletion.events(overdue, self.pods.values())
        draft = ReconcilePlan(apply=apply, delete=tuple(overdue), events=told, requeue_after=_soonest(looks))
        return self._written(accounts, leaving, draft)

    def _running(self, accounts: FailureCounts, deadline: datetime | None) -> ReconcilePlan:
        self.wanted = self._of_now(accounts.scopes)
        pods, reading = self.pods.values(), self.observed.reading
        replaced = pod_replacement.leaving(self.wanted, self.sizes, pods, reading, self.now)
        replaced += start_back_off.replaced(self.job, pods, self.now)
        going = {pod.name: pod for pod in (*scaling.leaving(self.job, pods, self.now), *replaced)}
        leaving = [pod for pod in going.values() if pod.uid not in self.lost]
        hung = [
            PodDeletion(pod.name, pod.uid, grace=lost_workers.GRACE_SECONDS) for pod in pods if pod.uid in self.lost
        ]
        # Pods of another template go at their user's wish.
        ends = [each for each in self._listed().values() if not self.wanted.outdated(each)]
        entered = pod_back_off.entered(self.before, ends, accounts.with_deleted(leaving), accounts.words, self.now)
        self.places = pod_back_off.kept(entered, scaling.names(self.job), self.wanted.marks, self.pods, self.now)
        apply, issue = self._wanted()
        if apply and self.started is None:
            self.started = self.now
        waits, began = pod_back_off.told(self.places, self.now), bool(self.before.get("progress"))
        waits = [*waits, *forced_deletion.told(self.job, pods, self.before, reading, self.now)]
        lifecycle.running(self.conditions, self.job, self.observed, self.now, waits, began=began)
        if not self.admission.planned and not self.pods:
            told = f"nothing was started: {self.admission.problem}"
            self.conditions.set(ConditionType.RUNNING, False, RunningReason.PENDING, told)
        looks = [
            _seconds(deadline, self.now),
            scaling.next_overdue(self.pods.values(), self.now, self.force),
            REFUSED_RETRY_SECONDS if self._refused else None,
            TRIAL_RETRY_SECONDS if self.observed.verdict else None,
            0.0 if len(apply) >= MAX_PODS_PER_RECONCILE and not self._refused else None,
            job_status.PROGRESS_SECONDS if self._readable() else None,
            PATIENCE.total_seconds() if any(each.unschedulable for each in self.pods.values()) else None,
            requeue_after(self.pods.values(), self.now),
            pod_back_off.requeue_after(self.places, self.now),
            start_back_off.requeue_after(self.job, self.pods.values(), self.now),
            scaling.next_farewell(self.pods.values(), self.now),
            _seconds(self.observed.certificates_expire, self.now),
            gang_admission.AGAIN_SECONDS if self.placed.blocked else None,
            lost_workers.next_lost(self.job, pods, reading, self.now),
        ]
        overdue = scaling.overdue(self.pods.values(), self.now, self.force)
        telling = resize.told(self.observed.reading, self.sizes) if self._readable() else None
        draft = ReconcilePlan(
            resize=telling,
            apply=apply,
            delete=(*hung, *overdue),
            events=forced_deletion.events(overdue, pods),
            issue_certificates=issue,
            requeue_after=_soonest(looks),
        )
        return self._written(accounts, leaving, draft)

    def _readable(self) -> bool:
        coordinator = self.pods.get(identity.pod_name(self.job, Group.COORDINATOR, 0))
        return coordinator is not None and coordinator.phase == "Running"

    def _wanted(self) -> tuple[tuple[Json, ...], bool]:
        """Objects to apply, and whether certificates come first."""
        if not self.admission.planned:
            return (), False
        expire = self.observed.certificates_expire
        issue = expire is None or expire <= self.now
        made = [*self._outdated(), *gang_admission.gang_objects(self.job, self.placed, self.observed)]
        found = [with_fingerprint(each) for each in made]
        missing = self._missing()[:MAX_PODS_PER_RECONCILE] if expire is not None and not self.placed.blocked else []
        revision, epochs = self.admission.revision if missing else None, self.wanted.epochs
        if revision is not None:
            made_pods = (revision.pod(group, index, epochs.get(group, 0)) for group, index in missing)
            found += [self.placed.pod(self.job, each) for each in made_pods]
        return tuple(found), issue

    def _outdated(self) -> list[Json]:
        """What pods need and is not there as it should be."""
        known = self.observed.applied
        due = {place for place, mark in self.admission.fingerprints.items() if known.get(place) != mark}
        if self.observed.kept.packed and self.observed.kept.packed != self.admission.kept.packed:
            due.add(("ConfigMap", identity.configuration_name(self.job)))
        made = plain(self.job, self.admission.kept.data, self.observed.home) if due else []
        return [each for each in made if (kind_of(each), each["metadata"]["name"]) in due]

    def _missing(self) -> list[tuple[Group, int]]:
        taken = self.pods.keys() | self.observed.taken | pod_back_off.waiting(self.places, self.now).keys()
        return scaling.missing(self.job, taken)

    def _written(
        self,
        accounts: FailureCounts,
        leaving: list[ObservedPod],
        draft: ReconcilePlan,
        completion: datetime | None = None,
    ) -> ReconcilePlan:
        """`draft` with the deletions, and with the status when it has to be written."""
        # A finished job counts nothing any more.
        accounted = {} if completion else accounts.with_deleted(leaving)
        groups = job_status.groups(
            self.job,
            self.sizes,
            self.pods.values(),
            self.observed.reading,
            self.before,
            accounts.restarts,
            self.wanted,
        )
        if completion is None and not self.resting:
            resize.resizing(self.conditions, self.before, groups, self.sizes, self.pods.values())
            pod_replacement.restarting(self.conditions, self.wanted, groups, self.pods.values(), accounts.scopes)
        written = self._status(accounts, accounted, groups, completion)
        draft = replace(draft, delete=(*_deletions(leaving), *draft.delete))
        if completion is None:
            asked, given_back = (self.job, self.placed, self.observed), self.job.spec.suspend or self.released
            withdraw = gang_admission.withdrawn_objects(*asked, given_back=given_back)
            draft = replace(draft, withdraw=withdraw, report=gang_admission.queue_report(*asked, given_back=given_back))
        if job_status.news(written) == job_status.news(self.before):
            return draft if self._age() < job_status.PROGRESS_SECONDS else replace(draft, labels=self._labels(draft))
        held = self._held(written)
        if held is not None:
            return replace(draft, requeue_after=_soonest([draft.requeue_after, held]))
        events = (*draft.events, *accounts.events, *self.conditions.events(), *self.told, *self._unread())
        return replace(draft, status=written, events=events, labels=self._labels(draft))

    def _unread(self) -> list[JobEvent]:
        """Of each object that cannot be read, when the last status did not say so."""
        said = "\n".join(each["message"] for each in self.before.get("conditions") or [])
        return [JobEvent("Unreadable", each, warning=True) for each in unread(self.observed) if each not in said]

    def _labels(self, draft: ReconcilePlan) -> tuple[PoolLabel, ...]:
        reading = self.observed.reading
        if reading is None or self.now - reading.at > lifecycle.READING_GOOD_FOR:
            return ()
        going = {each.uid for each in draft.delete}
        return migration_pool.labels(self.job, (each for each in self.pods.values() if each.uid not in going), reading)

    def _status(
        self, accounts: FailureCounts, accounted: Mapping[str, str], groups: list[Json], completion: datetime | None
    ) -> Json:
        before, ended = self.before, [*self.pods.values(), *self.observed.ended]
        over, iterations = completion is not None, self.job.spec.iterations
        reading = self.observed.reading
        last = job_status.last_said(reading, ended, iterations, over=over)
        written: Json = {
            "conditions": self.conditions.written(),
            "algorithm": self.job.spec.algorithm.name,
            "groups": groups,
            "scale": job_status.scale(self.job, self.pods.values()),
            "restarts": accounts.written(accounted, self.places if completion is None else {}),
        }
        if (generation := self.stored["metadata"].get("generation")) is not None:
            written["observedGeneration"] = generation
        if self.started is not None:
            written["startTime"] = rfc3339(self.started)
            revision = self.admission.status if self.admission.planned else before.get("revision")
            if revision:
                written["revision"] = dict(revision)
        if self.release is not None and completion is None and not self.job.spec.suspend:
            written["release"] = self.release.written()
        if completion is not None:
            written["completionTime"] = rfc3339(completion)
        written |= job_status.of_coordinator(last, reading, before)
        if last is not None:
            self.told += job_status.steps_skipped(written["progress"], before.get("progress") or {})
        if reading is not None:
            generation = self.sizes.get(Group.GENERATION, 0)
            written["migrationPool"], told = migration_pool.pooled(reading, generation, before, self.now)
            self.told += told
        written |= forced_deletion.kept(self.job, before, reading)
        if accounts.complete:
            written["progress"] = job_status.all_done(written.get("progress"), iterations, self.now)
        return written

    def _held(self, written: Json) -> float | None:
        """Seconds for which a change that is no hurry waits; None when it is to be written now."""
        if job_status.slow_part(written) != job_status.slow_part(self.before):
            return None
        age = self._age()
        return job_status.PROGRESS_SECONDS - age if age < job_status.PROGRESS_SECONDS else None

    def _age(self) -> float:
        """Seconds since this process wrote the status."""
        written = self.observed.status_written
        return math.inf if written is None else (self.now - written).total_seconds()


def _deletions(pods: list[ObservedPod]) -> list[PodDeletion]:
    return [PodDeletion(each.name, each.uid) for each in pods]


def _seconds(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _soonest(seconds: list[float | None]) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
