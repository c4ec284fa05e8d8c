"""Where a job's pods are placed and whether they may exist at all: its gang, its queue, and what they ask of a visit.

Rule: pure. A job that a queue has not admitted has no pod; one whose admission is taken back ends as for a suspension,
the coordinator with its checkpoint first, and keeps its reservation until the last pod is gone. Objects that cannot be
changed are replaced while no pod names them, and left as they are otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlhf_api.conditions import AdmittedReason, ConditionType, RunningReason, SuspendedReason
from rlhf_api.job import RLHFJob
from rlhf_api.job.scheduling import OURS
from rlhf_api.names import Group
from rlhf_operator.gang import choose, kueue, kueue_workload, members
from rlhf_operator.gang.apis import RESOURCES, kind_of
from rlhf_operator.gang.backend import GangBackend
from rlhf_operator.gang.kueue import KueueBackend
from rlhf_operator.gang.kueue_workload import QueueDecision, QueueGate, WorkloadReport
from rlhf_operator.reconcile.conditions import Conditions
from rlhf_operator.reconcile.diagnostics import occupied, unread
from rlhf_operator.reconcile.last_applied import fingerprint
from rlhf_operator.reconcile.observed_job import ObservedJob
from rlhf_operator.reconcile.observed_pod import ObservedPod
from rlhf_operator.reconcile.revisions.pinning import PinnedJob

Json = dict[str, Any]
ObjectKey = tuple[str, str]
"""(kind, name) of an object."""

AGAIN_SECONDS: Final = 15.0
"""Between looks at what somebody else has to put right."""


def foreign(stored: Mapping[str, Any]) -> bool:
    """Another controller reconciles the job (spec.managedBy): hands off, status included."""
    spec = stored.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("managedBy", OURS) != OURS)


@dataclass(frozen=True)
class GangAdmission:
    """What a visit goes by."""

    backend: GangBackend | None = None
    gate: QueueGate | None = None
    """Of a queue; None when there is none."""
    note: str = ""
    blocked: str = ""
    """Why no pod is made for now, though pods may exist."""
    pods: Mapping[Group, Json] = field(default_factory=dict)
    """One of each group, as they are made."""

    @property
    def closed(self) -> bool:
        """No pod may exist."""
        return self.gate is not None and not self.gate.open

    def pod(self, job: RLHFJob, made: Json) -> Json:
        """A pod of the job as its gang and its priority have it."""
        name = job.spec.scheduling.priority_class_name
        if name and not made["spec"].get("priorityClassName"):
            made = {**made, "spec": {**made["spec"], "priorityClassName": name}}
        return self.backend.join(job, made) if self.backend else made


def placed(admission: PinnedJob, observed: ObservedJob) -> tuple[PinnedJob, GangAdmission]:
    """The placement of a job, and its admission with what is wrong with that."""
    job = admission.job
    if job is None or not admission.planned:
        return admission, GangAdmission()
    choice = choose(job, observed.served)
    if choice.problem:
        return replace(admission, problem=choice.problem, reason=choice.reason), GangAdmission(note=choice.note)
    backend, revision = choice.backend, admission.revision if choice.backend else None
    if backend is None or revision is None:
        return admission, GangAdmission(note=choice.note)
    pods = revision.pods
    if not isinstance(backend, KueueBackend):
        going = _going(job, backend, pods, observed)
        return admission, GangAdmission(backend, note=choice.note, blocked=going, pods=pods)
    counts = {group.value: count for group, count in members.counts(job).items()}
    found = kueue_workload.gate(kueue.queue_of(job) or "", observed.workload, counts, revision.claims)
    backend = replace(backend, priority=observed.priority, claims=revision.claims)
    if observed.priority is not None and observed.priority.value is None and not found.open:
        unread = f"{observed.priority.kind} {observed.priority.name} cannot be read"
        return admission, GangAdmission(backend, found, blocked=unread, pods=pods)
    if observed.workload is None or not found.open:
        return admission, GangAdmission(backend, found, pods=pods)
    decision = QueueDecision(observed.workload, observed.flavors)
    blocked = ""
    if decision.unknown:
        blocked = f"ResourceFlavor {', '.join(decision.unknown)}, which Kueue assigned, cannot be read"
    return admission, GangAdmission(replace(backend, decision=decision), found, blocked=blocked, pods=pods)


def wanted(job: RLHFJob, placement: GangAdmission, observed: ObservedJob) -> list[Json]:
    """Objects of the gang to apply now, without our fingerprint."""
    if placement.backend is None or (placement.closed and placement.blocked):
        return []
    found = []
    for body, mark, fresh in _compared(job, placement.backend, placement.pods, observed):
        reserved = observed.workload is not None and (observed.workload.cluster_queue or observed.workload.going)
        kept = mark is not None and (mark == "" or placement.backend.fixed or (placement.gate and reserved))
        if mark != fresh and not kept:
            found.append(body)
    return found


def withdrawn(
    job: RLHFJob, placement: GangAdmission, observed: ObservedJob, *, given_back: bool
) -> tuple[ObjectKey, ...]:
    """Objects of gangs to delete now; none while a pod is left, which may be of them.

    Those of a job that has given everything back too: schedulers and queues keep room for a group that is there.
    """
    if observed.pods:
        return ()
    ours = {place for place, mark in observed.applied.items() if place[0] in RESOURCES and mark}
    if placement.backend is None:
        return tuple(sorted(ours))
    keep = set()
    for body, mark, fresh in _compared(job, placement.backend, placement.pods, observed):
        if (
            not given_back
            and not (placement.gate and placement.gate.renew)
            and (mark == fresh or not placement.backend.fixed)
        ):
            keep.add((kind_of(body), str(body["metadata"]["name"])))
    return tuple(sorted(ours - keep))


def report(job: RLHFJob, placement: GangAdmission, observed: ObservedJob, *, given_back: bool) -> WorkloadReport | None:
    """What the queue is to be told."""
    if placement.gate is None or observed.workload is None or given_back:
        return None
    listed = list(observed.pods.values())
    ready = all(
        sum(pod.group == group and pod.ready and pod.active for pod in listed) >= count
        for group, count in members.minimum(job).items()
    )
    return kueue_workload.report(placement.gate, observed.workload, pods=bool(listed), ready=ready)


def finished(observed: ObservedJob, message: str, *, succeeded: bool) -> WorkloadReport | None:
    """What the queue is told of a job that has ended."""
    if observed.workload is None or observed.workload.going:
        return None
    return kueue_workload.finished(observed.workload, message, succeeded=succeeded)


def admitted(conditions: Conditions, placement: GangAdmission, job: RLHFJob, observed: ObservedJob) -> None:
    """Sets Admitted of a job that is not finished."""
    if placement.gate is not None:
        refused = [f"{name} is refused: {why}" for name, why in observed.refusals.items() if placement.closed]
        refused += [*unread(observed), *occupied(job, observed)] if placement.closed else []
        told = ". ".join(each for each in (placement.gate.message, placement.blocked, *refused) if each)
        conditions.set(ConditionType.ADMITTED, placement.gate.open, placement.gate.reason, told)
        return
    told = f"no queueing system is used; {placement.note}" if placement.note else "no queueing system is used"
    if placement.backend is not None:
        told += f"; gang: {placement.backend.mode}"
    conditions.set(ConditionType.ADMITTED, True, AdmittedReason.NO_QUEUE, told)


def waiting(conditions: Conditions, job: RLHFJob, gate: QueueGate, pods: Iterable[ObservedPod]) -> list[ObservedPod]:
    """Sets Running and Suspended of a job that waits in its queue, and answers the pods to delete now."""
    listed = list(pods)
    conditions.set(ConditionType.SUSPENDED, False, SuspendedReason.NOT_SUSPENDED, "spec.suspend is false")
    if not listed:
        conditions.set(ConditionType.RUNNING, False, RunningReason.QUEUED, f"nothing is started: {gate.message}")
        return []
    stopping = [pod for pod in listed if pod.group == Group.COORDINATOR]
    kept = (
        "saves a checkpoint" if job.spec.checkpoints else "ends; spec.checkpoints is not set, so it begins anew later"
    )
    told = f"{gate.message}; the coordinator {kept}" if stopping else f"{gate.message}; the workers end"
    conditions.set(ConditionType.RUNNING, False, RunningReason.CHECKPOINTING, told)
    return [pod for pod in stopping or listed if pod.deletion is None]


def _compared(
    job: RLHFJob, backend: GangBackend, pods: Mapping[Group, Json], observed: ObservedJob
) -> list[tuple[Json, str | None, str]]:
    """(object, fingerprint of the one that exists, fingerprint of this one); "" is one that is being deleted."""
    return [
        (body, observed.applied.get((kind_of(body), body["metadata"]["name"])), fingerprint(body))
        for body in backend.objects(job, pods)
    ]


def _going(job: RLHFJob, backend: GangBackend, pods: Mapping[Group, Json], observed: ObservedJob) -> str:
    """A pod that named a group on its way out would keep it there."""
    if not backend.fixed or observed.pods:
        return ""
    gone = [body for body, mark, fresh in _compared(job, backend, pods, observed) if mark is not None and mark != fresh]
    return f"the {gone[0]['kind']} of another size has to be gone first" if gone else ""
