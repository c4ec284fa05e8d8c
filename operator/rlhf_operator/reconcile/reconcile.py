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
    back_off,
    deletion,
    forced,
    life,
    lost,
    placement,
    pool,
    release,
    resize,
    restart,
    scale,
    status,
)
from rlhf_operator.reconcile.admission import Admission, admit
from rlhf_operator.reconcile.applied import marked
from rlhf_operator.reconcile.back_off import Place
from rlhf_operator.reconcile.conditions import Conditions, rfc3339
from rlhf_operator.reconcile.failure import Account, account
from rlhf_operator.reconcile.observed import Observed
from rlhf_operator.reconcile.pinning import Pinned, pinned
from rlhf_operator.reconcile.plan import Deletion, Event, Plan, PoolLabel
from rlhf_operator.reconcile.pod import PATIENCE, Pod, time_of
from rlhf_operator.reconcile.troubles import look_again, unread

Json = dict[str, Any]

REFUSED_AGAIN_SECONDS: Final = 15.0
"""Between attempts at what the API server refused (quota), or where a name is taken: somebody has to act, and then
waits for us."""
TRIAL_AGAIN_SECONDS: Final = 300.0
"""Between dry runs of a template that the API server refuses; an edit of the job is tried at once."""

PODS_A_TURN: Final = 250
"""Pods one plan makes: 25 milliseconds of rendering, then other jobs have their turn."""


def reconcile(job: Mapping[str, Any], observed: Observed, now: datetime) -> Plan:
    """What is to be done for the stored RLHFJob `job`."""
    before: Mapping[str, Any] = job.get("status") or {}
    conditions = Conditions(before.get("conditions") or [], now, job["metadata"].get("generation"))
    if placement.foreign(job):
        return Plan()
    if job["metadata"].get("deletionTimestamp"):
        return deletion.deleting(job, conditions, observed, now)
    admission, placed = placement.placed(pinned(admit(job), job, observed), observed)
    if admission.planned and observed.verdict and not admission.settled:
        admission = replace(admission, problem=observed.verdict, reason=PlannedReason.REFUSED)
    if admission.job is None:
        return _refused(job, conditions, admission, before)
    finished = conditions.holds(ConditionType.COMPLETE) or conditions.holds(ConditionType.FAILED)
    if finished:
        plan = _finished(admission.job, conditions, before, observed, now)
    else:
        plan = _Visit(job, admission, placed, conditions, before, observed, now).plan()
    return replace(plan, finalizer=deletion.hold(job, admission.job, finished=finished))


def _refused(job: Mapping[str, Any], conditions: Conditions, admission: Admission, before: Mapping[str, Any]) -> Plan:
    """Nothing can be read from the manifest, so what runs goes on as it is until the manifest is put right."""
    conditions.set(ConditionType.PLANNED, False, admission.reason, admission.problem)
    if conditions.reason(ConditionType.RUNNING) == RunningReason.PENDING:
        told = f"nothing was started: {admission.problem}"
        conditions.set(ConditionType.RUNNING, False, RunningReason.PENDING, told)
    written = dict(before) | {"conditions": conditions.written()}
    if (generation := job["metadata"].get("generation")) is not None:
        written["observedGeneration"] = generation
    return Plan() if written == before else Plan(status=written, events=tuple(conditions.events()))


def _finished(
    job: RLHFJob, conditions: Conditions, before: Mapping[str, Any], observed: Observed, now: datetime
) -> Plan:
    """What still runs is stopped, what has ended is kept for its logs, until the job is too old."""
    expiry = life.expiry(job, before)
    if expiry is not None and expiry <= now:
        return Plan(delete_job=True)
    left = [each for each in observed.pods.values() if each.active]
    force = forced.after(job, before)
    overdue = [*scale.overdue(observed.pods.values(), now, force), *scale.strangers(observed.unreadable)]
    looks = [scale.next_overdue(observed.pods.values(), now, force), _seconds(expiry, now)]
    told, succeeded = conditions.message(ConditionType.RUNNING), conditions.holds(ConditionType.COMPLETE)
    report = None if left else placement.finished(observed, told, succeeded=succeeded)
    return Plan(delete=(*_deletions(left), *overdue), report=report, look_again_after=_soonest(looks))


class _Visit:
    """One look at a job that is not finished."""

    def __init__(
        self,
        stored: Mapping[str, Any],
        admission: Pinned,
        placed: placement.Placement,
        conditions: Conditions,
        before: Mapping[str, Any],
        observed: Observed,
        now: datetime,
    ) -> None:
        assert admission.job is not None
        self.job, self.admission, self.stored = admission.job, admission, stored
        self.placed = placed
        self.conditions, self.before, self.observed, self.now = conditions, before, observed, now
        self.pods = observed.pods
        self.started = time_of(before.get("startTime"))
        self.sizes = scale.desired(self.job)
        self.wanted = self._of_now(())
        self.force = forced.after(self.job, before)
        self.generation = int(stored["metadata"].get("generation") or 0)
        self.release = release.known(before)
        if admission.planned and not self.resting:
            asked = self.job, self.pods, observed.reading, self.release, self.generation, now
            self.release = release.decided(*asked)
        going_on = admission.planned and not self.resting
        self.lost = lost.lost(self.job, self.pods.values(), observed.reading, now) if going_on else {}
        self.told: tuple[Event, ...] = ()
        """Events that belong to no condition."""
        self.places: Mapping[str, Place] = {}
        """Those whose pod ended lately."""

    def plan(self) -> Plan:
        """The plan of this visit."""
        self._planned()
        accounts = self._accounts()
        deadline = life.deadline(self.job, self.started)
        if accounts.complete:
            life.completed(self.conditions, self.job.spec.iterations)
        elif accounts.verdict is not None:
            life.failed(self.conditions, *accounts.verdict)
        elif deadline is not None and deadline <= self.now and (self.released or not self.resting):
            told = f"spec.runPolicy.activeDeadlineSeconds is over since {rfc3339(deadline)}"
            life.failed(self.conditions, FinishedReason.DEADLINE, told)
        elif self.resting:
            return self._suspended(accounts)
        else:
            return self._running(accounts, deadline)
        ends = [each for each in self.pods.values() if each.active]
        return self._written(accounts, ends, Plan(), completion=self.now)

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

    def _of_now(self, scopes: Iterable[str]) -> restart.Wanted:
        marks = self.admission.hashes if self.admission.planned else {}
        return restart.wanted(self.job, self.sizes, self.before, scopes, marks)

    def _planned(self) -> None:
        warnings = f"; warning: {self.admission.warnings}" if self.admission.warnings else ""
        told = self.admission.problem or f"{self.admission.note or 'the manifest is valid'}{warnings}"
        self.conditions.set(ConditionType.PLANNED, self.admission.planned, self.admission.reason, told)
        if self.admission.planned:
            placement.admitted(self.conditions, self.placed, self.job, self.observed)

    def _accounts(self) -> Account:
        policy, stopping = self.job.spec.run_policy, self.resting
        started = self.now if stopping else self.started
        known = self.before.get("restarts") or {}
        return account(known, self._listed().values(), policy, self.now, started, stopping=stopping, lost=self.lost)

    def _listed(self) -> dict[str, Pod]:
        """Uid -> pod, also of those that are gone; one that goes while the rest is observed is in both."""
        return {pod.uid: pod for pod in (*self.observed.ended, *self.pods.values())}

    def _suspended(self, accounts: Account) -> Plan:
        apply: tuple[Json, ...] = ()
        if self.release is not None and self.released and not self.job.spec.suspend:
            leaving = life.released(self.conditions, self.job, self.release.told(), self.pods.values())
        elif self.placed.gate is None or self.job.spec.suspend:
            leaving = life.suspended(self.conditions, self.job, self.pods.values())
        else:
            leaving = placement.waiting(self.conditions, self.job, self.placed.gate, self.pods.values())
            apply = tuple(map(marked, placement.wanted(self.job, self.placed, self.observed)))
        if not self.pods and not self.released:
            self.started = None
        # A queue has a back-off of its own; what its user suspended begins anew.
        self.places = {} if self.job.spec.suspend else back_off.known(self.before)
        overdue = [*scale.overdue(self.pods.values(), self.now, self.force), *scale.strangers(self.observed.unreadable)]
        look = scale.next_overdue(self.pods.values(), self.now, self.force)
        held_up = self._refused or self.placed.blocked
        again = _seconds(self.release.until, self.now) if self.release is not None and self.released else None
        looks = [look, again, REFUSED_AGAIN_SECONDS if held_up else None]
        told = forced.events(overdue, self.pods.values())
        draft = Plan(apply=apply, delete=tuple(overdue), events=told, look_again_after=_soonest(looks))
        return self._written(accounts, leaving, draft)

    def _running(self, accounts: Account, deadline: datetime | None) -> Plan:
        self.wanted = self._of_now(accounts.scopes)
        pods, reading = self.pods.values(), self.observed.reading
        replaced = restart.leaving(self.wanted, self.sizes, pods, reading, self.now)
        replaced += release.replaced(self.job, pods, self.now)
        going = {pod.name: pod for pod in (*scale.leaving(self.job, pods, self.now), *replaced)}
        leaving = [pod for pod in going.values() if pod.uid not in self.lost]
        hung = [Deletion(pod.name, pod.uid, grace=lost.GRACE_SECONDS) for pod in pods if pod.uid in self.lost]
        # Pods of another template go at their user's wish.
        ends = [each for each in self._listed().values() if not self.wanted.outdated(each)]
        entered = back_off.entered(self.before, ends, accounts.with_deleted(leaving), accounts.words, self.now)
        self.places = back_off.kept(entered, scale.names(self.job), self.wanted.marks, self.pods, self.now)
        apply, issue = self._wanted()
        if apply and self.started is None:
            self.started = self.now
        waits, began = back_off.told(self.places, self.now), bool(self.before.get("progress"))
        waits = [*waits, *forced.told(self.job, pods, self.before, reading, self.now)]
        life.running(self.conditions, self.job, self.observed, self.now, waits, began=began)
        if not self.admission.planned and not self.pods:
            told = f"nothing was started: {self.admission.problem}"
            self.conditions.set(ConditionType.RUNNING, False, RunningReason.PENDING, told)
        looks = [
            _seconds(deadline, self.now),
            scale.next_overdue(self.pods.values(), self.now, self.force),
            REFUSED_AGAIN_SECONDS if self._refused else None,
            TRIAL_AGAIN_SECONDS if self.observed.verdict else None,
            0.0 if len(apply) >= PODS_A_TURN and not self._refused else None,
            status.PROGRESS_SECONDS if self._readable() else None,
            PATIENCE.total_seconds() if any(each.unschedulable for each in self.pods.values()) else None,
            look_again(self.pods.values(), self.now),
            back_off.look_again(self.places, self.now),
            release.look_again(self.job, self.pods.values(), self.now),
            scale.next_farewell(self.pods.values(), self.now),
            _seconds(self.observed.certificates_expire, self.now),
            placement.AGAIN_SECONDS if self.placed.blocked else None,
            lost.next_lost(self.job, pods, reading, self.now),
        ]
        overdue = scale.overdue(self.pods.values(), self.now, self.force)
        telling = resize.told(self.observed.reading, self.sizes) if self._readable() else None
        draft = Plan(
            resize=telling,
            apply=apply,
            delete=(*hung, *overdue),
            events=forced.events(overdue, pods),
            issue_certificates=issue,
            look_again_after=_soonest(looks),
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
        made = [*self._outdated(), *placement.wanted(self.job, self.placed, self.observed)]
        found = [marked(each) for each in made]
        missing = self._missing()[:PODS_A_TURN] if expire is not None and not self.placed.blocked else []
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
        taken = self.pods.keys() | self.observed.taken | back_off.waiting(self.places, self.now).keys()
        return scale.missing(self.job, taken)

    def _written(self, accounts: Account, leaving: list[Pod], draft: Plan, completion: datetime | None = None) -> Plan:
        """`draft` with the deletions, and with the status when it has to be written."""
        # A finished job counts nothing any more.
        accounted = {} if completion else accounts.with_deleted(leaving)
        groups = status.groups(
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
            restart.restarting(self.conditions, self.wanted, groups, self.pods.values(), accounts.scopes)
        written = self._status(accounts, accounted, groups, completion)
        draft = replace(draft, delete=(*_deletions(leaving), *draft.delete))
        if completion is None:
            asked, given_back = (self.job, self.placed, self.observed), self.job.spec.suspend or self.released
            withdraw = placement.withdrawn(*asked, given_back=given_back)
            draft = replace(draft, withdraw=withdraw, report=placement.report(*asked, given_back=given_back))
        if status.news(written) == status.news(self.before):
            return draft if self._age() < status.PROGRESS_SECONDS else replace(draft, labels=self._labels(draft))
        held = self._held(written)
        if held is not None:
            return replace(draft, look_again_after=_soonest([draft.look_again_after, held]))
        events = (*draft.events, *accounts.events, *self.conditions.events(), *self.told, *self._unread())
        return replace(draft, status=written, events=events, labels=self._labels(draft))

    def _unread(self) -> list[Event]:
        """Of each object that cannot be read, when the last status did not say so."""
        said = "\n".join(each["message"] for each in self.before.get("conditions") or [])
        return [Event("Unreadable", each, warning=True) for each in unread(self.observed) if each not in said]

    def _labels(self, draft: Plan) -> tuple[PoolLabel, ...]:
        reading = self.observed.reading
        if reading is None or self.now - reading.at > life.READING_GOOD_FOR:
            return ()
        going = {each.uid for each in draft.delete}
        return pool.labels(self.job, (each for each in self.pods.values() if each.uid not in going), reading)

    def _status(
        self, accounts: Account, accounted: Mapping[str, str], groups: list[Json], completion: datetime | None
    ) -> Json:
        before, ended = self.before, [*self.pods.values(), *self.observed.ended]
        over, iterations = completion is not None, self.job.spec.iterations
        reading = self.observed.reading
        last = status.last_said(reading, ended, iterations, over=over)
        written: Json = {
            "conditions": self.conditions.written(),
            "algorithm": self.job.spec.algorithm.name,
            "groups": groups,
            "scale": status.scale(self.job, self.pods.values()),
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
        written |= status.of_coordinator(last, reading, before)
        if last is not None:
            self.told += status.steps_skipped(written["progress"], before.get("progress") or {})
        if reading is not None:
            generation = self.sizes.get(Group.GENERATION, 0)
            written["migrationPool"], told = pool.pooled(reading, generation, before, self.now)
            self.told += told
        written |= forced.kept(self.job, before, reading)
        if accounts.complete:
            written["progress"] = status.all_done(written.get("progress"), iterations, self.now)
        return written

    def _held(self, written: Json) -> float | None:
        """Seconds for which a change that is no hurry waits; None when it is to be written now."""
        if status.slow_part(written) != status.slow_part(self.before):
            return None
        age = self._age()
        return status.PROGRESS_SECONDS - age if age < status.PROGRESS_SECONDS else None

    def _age(self) -> float:
        """Seconds since this process wrote the status."""
        written = self.observed.status_written
        return math.inf if written is None else (self.now - written).total_seconds()


def _deletions(pods: list[Pod]) -> list[Deletion]:
    return [Deletion(each.name, each.uid) for each in pods]


def _seconds(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _soonest(seconds: list[float | None]) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
