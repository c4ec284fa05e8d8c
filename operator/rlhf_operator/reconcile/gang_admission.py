"""Decides how a job's pods are placed together and whether they may exist: its gang and its queue.

Rule: pure. Immutable objects are replaced only when the job has no pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import AdmittedReason, ConditionType
from rlhf_common.names import Group
from rlhf_operator.gang import choose, members
from rlhf_operator.gang.apis import RESOURCES, kind_of
from rlhf_operator.gang.backend import GangBackend, QueueGate, QueueingBackend, WorkloadReport
from rlhf_operator.gang.none import NoGangBackend
from rlhf_operator.reconcile.conditions import ConditionUpdate, StoredConditions
from rlhf_operator.reconcile.diagnostics import occupied_names, unreadable_objects
from rlhf_operator.reconcile.last_applied import fingerprint
from rlhf_operator.reconcile.observed.observed_job import ObservedJob
from rlhf_operator.reconcile.refusals import with_remedy
from rlhf_operator.reconcile.revisions.pinning import PinnedJob

Json = dict[str, Any]
ObjectKey = tuple[str, str]
"""(kind, name) of an object."""


@dataclass(frozen=True)
class GangAdmission:
    """The gang of a job, and whether its pods may exist."""

    backend: GangBackend = field(default_factory=NoGangBackend)
    gate: QueueGate | None = None
    """Whether the queue lets the pods exist; None without a queue."""
    note: str = ""
    """Note for the user about the choice of the backend."""
    blocked: str = ""
    """Reason besides the gate why no pod is created for now; empty if there is none."""
    pods: Mapping[Group, Json] = field(default_factory=dict)
    """One pod of each group, if the backend creates objects."""

    @property
    def closed(self) -> bool:
        """Return whether no pod may exist."""
        return self.gate is not None and not self.gate.open

    @property
    def limits(self) -> Mapping[str, int]:
        """Return group -> pods that may exist, for groups that want more."""
        return {} if self.gate is None else self.gate.limits

    def pod(self, job: RLHFJob, pod: Json) -> Json:
        """Return a pod of the job with the fields of its gang and its priority."""
        name = job.spec.scheduling.priority_class_name
        if name and not pod["spec"].get("priorityClassName"):
            pod = {**pod, "spec": {**pod["spec"], "priorityClassName": name}}
        return self.backend.join(job, pod)


def admit_gang(pinned: PinnedJob, stored: Mapping[str, Any], observed: ObservedJob) -> tuple[PinnedJob, GangAdmission]:
    """Return the job with the problems of its gang, and the gang.

    A job that has started continues without a queue that it has not asked.
    """
    job = pinned.job
    if job is None or not pinned.planned:
        return pinned, GangAdmission()
    if job.spec.devices is not None:
        return pinned, GangAdmission(note="a job with spec.devices has no gang: its coordinator runs first")
    choice = choose(job, observed.served)
    if choice.problem:
        return replace(pinned, problem=choice.problem, reason=choice.reason), GangAdmission(note=choice.note)
    status = stored.get("status") or {}
    started = bool(observed.pods or status.get("startTime"))
    if choice.waits and not started:
        return pinned, GangAdmission(gate=QueueGate(False, AdmittedReason.NOT_SERVED, choice.waits))
    if choice.waits:
        return pinned, GangAdmission(note=f"the job has started without a queue: {choice.waits}")
    asked = observed.queue is not None and bool(observed.queue.requests_hash)
    unqueued = StoredConditions.from_status(status).reason(ConditionType.ADMITTED) == AdmittedReason.NO_QUEUE
    if isinstance(choice.backend, QueueingBackend) and started and unqueued and not asked:
        return pinned, GangAdmission(note="the job has started without its queue, and asks for quota at its next start")
    backend, revision = choice.backend, pinned.revision if choice.backend.makes_objects else None
    if revision is None:
        return pinned, GangAdmission(note=choice.note)
    if isinstance(backend, QueueingBackend):
        queue = backend.admit(job, revision.requests_hash, observed.queue)
        return pinned, GangAdmission(queue.backend, queue.gate, choice.note, queue.blocked, revision.pods)
    blocked = _going(job, backend, revision.pods, observed)
    return pinned, GangAdmission(backend, None, choice.note, blocked, revision.pods)


def gang_objects(job: RLHFJob, gang: GangAdmission, observed: ObservedJob) -> list[Json]:
    """Return the objects of the gang to apply now, without our fingerprint."""
    if gang.closed and gang.blocked:
        return []
    queue = observed.queue if gang.gate is not None else None
    changed = []
    for body, applied, wanted in _compared(job, gang.backend, gang.pods, observed):
        reserved = queue is not None and queue.reserves(str(body["metadata"]["name"]))
        stays = applied is not None and (applied == "" or gang.backend.immutable or reserved)
        if applied != wanted and not stays:
            changed.append(body)
    return changed


def withdrawn_objects(
    job: RLHFJob, gang: GangAdmission, observed: ObservedJob, *, given_back: bool
) -> tuple[ObjectKey, ...]:
    """Return the objects of gangs to delete now; while pods remain, only superseded ones.

    `given_back`: without pods, all objects of a job that releases its resources are deleted.
    """
    ours = {key for key, applied in observed.applied.items() if key[0] in RESOURCES and applied}
    if observed.pods:
        superseded = gang.gate.superseded if gang.gate is not None else ()
        return tuple(sorted(key for key in ours if key[1] in superseded))
    renewed = gang.gate is not None and gang.gate.renew
    current_objects = {
        (kind_of(body), str(body["metadata"]["name"]))
        for body, applied, wanted in _compared(job, gang.backend, gang.pods, observed)
        if not given_back and not renewed and (applied == wanted or not gang.backend.immutable)
    }
    return tuple(sorted(ours - current_objects))


def queue_report(
    job: RLHFJob, gang: GangAdmission, observed: ObservedJob, *, given_back: bool
) -> WorkloadReport | None:
    """Return the report to the queue; None if there is none."""
    if gang.gate is None or observed.queue is None or given_back:
        return None
    pods = list(observed.pods.values())
    ready = all(
        sum(pod.group == group and pod.ready and pod.active for pod in pods)
        >= min(count, gang.limits.get(group, count))
        for group, count in members.minimum(job).items()
    )
    return observed.queue.report(gang.gate, pods_left=bool(pods), ready=ready)


def admitted_condition(job: RLHFJob, gang: GangAdmission, observed: ObservedJob, leaves: str) -> ConditionUpdate:
    """Return the condition Admitted of an unfinished job. `leaves`: why it leaves its queue; empty if it does not."""
    if gang.gate is not None and leaves:
        return _leaving(gang.gate, leaves, pods_left=bool(observed.pods))
    if gang.gate is not None:
        refused = observed.refusals.items() if gang.closed else ()
        problems = [f"{name} is refused: {with_remedy(job, why)}" for name, why in refused]
        problems += [*unreadable_objects(observed), *occupied_names(job, observed)] if gang.closed else []
        message = ". ".join(part for part in (gang.gate.message, gang.blocked, *problems) if part)
        return ConditionUpdate(ConditionType.ADMITTED, gang.gate.open, gang.gate.reason, message)
    message = f"no queueing system is used; {gang.note}" if gang.note else "no queueing system is used"
    if gang.backend.makes_objects:
        message += f"; gang: {gang.backend.mode}"
    return ConditionUpdate(ConditionType.ADMITTED, True, AdmittedReason.NO_QUEUE, message)


def _leaving(gate: QueueGate, why: str, *, pods_left: bool) -> ConditionUpdate:
    """Return the condition Admitted of a job that releases its reservation when its last pod is gone."""
    reserved = gate.open and pods_left
    if pods_left:
        message = f"{why}: its pods end, and then it leaves {gate.queue}"
    else:
        message = f"{why}: it is not in {gate.queue}, and no quota is reserved for it"
    return ConditionUpdate(
        ConditionType.ADMITTED, reserved, gate.reason if reserved else AdmittedReason.NOT_QUEUED, message
    )


def _compared(
    job: RLHFJob, backend: GangBackend, pods: Mapping[Group, Json], observed: ObservedJob
) -> list[tuple[Json, str | None, str]]:
    """Return (object, fingerprint of the existing one or None, fingerprint of this one) for each object of the gang.

    The existing one's is "" if it is being deleted or has none.
    """
    return [
        (body, observed.applied.get((kind_of(body), body["metadata"]["name"])), fingerprint(body))
        for body in backend.objects(job, pods)
    ]


def _going(job: RLHFJob, backend: GangBackend, pods: Mapping[Group, Json], observed: ObservedJob) -> str:
    """Return why no pod may be created now: an immutable object of the gang must be replaced first; else empty."""
    if not backend.immutable or observed.pods:
        return ""
    compared = _compared(job, backend, pods, observed)
    gone = [body for body, applied, wanted in compared if applied is not None and applied != wanted]
    return f"the {gone[0]['kind']} of another size must be deleted first" if gone else ""
