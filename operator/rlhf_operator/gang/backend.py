"""The interface of a gang backend: the objects that make a gang, and what a pod carries to be one of it.

A backend is one way to place a job's pods together. What only some can do is a Protocol of its own: a
`QueueingBackend` also says whether the job's pods may exist at all, by the state of its queue, which a `QueueApi`
reads from the queue's objects.

Rule: pure. A pod that is made later, for another size or in place of one that was lost, joins the gang that is there.
Nobody outside of this package asks which backend it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import AdmittedReason, PlannedReason
from rlhf_common.names import Group

Json = dict[str, Any]


class GangBackend(Protocol):
    """One way to place a job's pods together."""

    @property
    def mode(self) -> str:
        """Return its name in spec.scheduling.gang.mode."""

    @property
    def makes_objects(self) -> bool:
        """Return whether it applies objects at all, and so has to be given the job's pods."""

    @property
    def immutable(self) -> bool:
        """Return whether its objects cannot be changed: another one takes their place when no pod is left."""

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the manifests to apply before the pods. `pods` has one of each group, as the job's are made."""

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod as a member of the gang. The argument is not changed."""


@dataclass(frozen=True)
class QueueGate:
    """Whether the pods of a job may exist, as its queue has it."""

    open: bool
    reason: AdmittedReason
    message: str
    queue: str = "its queue"
    """Name of the queue, with its kind."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Group -> pods that may exist, for groups of which the job wants more than were admitted."""
    limited: str = ""
    """Why those groups do not grow, and what the user can do."""
    superseded: tuple[str, ...] = ()
    """Names of the queue's objects that the job needs no more, whatever pods it has."""
    renew: bool = False
    """The queue's object asks for something else than the job does by now: another takes its place when no pod is
    left."""
    release: bool = False
    """The reservation is to be given back when no pod is left."""


@dataclass(frozen=True)
class WorkloadReport:
    """What a queue is told of a job: conditions of its object, and that the reservation is given back."""

    conditions: Mapping[str, tuple[str, str, str]]
    """Type -> (status, reason, message)."""
    release: bool = False
    name: str = ""
    """Name of the object; empty: all by which the queue knows the job."""


class QueueState(Protocol):
    """What the queue of a job says of it, as it was observed."""

    def reserves(self, name: str) -> bool:
        """Return whether the queue's object of that name has a reservation, or is on its way out: it is not changed
        then."""

    @property
    def requests_hash(self) -> str:
        """Return the hash of the requests that the queue was asked by; empty when it was not asked."""

    def report(self, gate: QueueGate, *, pods_left: bool, ready: bool) -> WorkloadReport | None:
        """Return what the queue is to be told of a job that is not finished, None when it knows that.

        `ready`: all pods that an iteration needs are.
        """

    def finished_report(self, message: str, *, succeeded: bool) -> WorkloadReport | None:
        """Return what the queue is to be told of a job that has ended, None when it knows that."""


@dataclass(frozen=True)
class QueueAdmission:
    """A backend as the queue's state has it."""

    backend: GangBackend
    """It makes the queue's object, and places pods where they were admitted to."""
    gate: QueueGate
    blocked: str = ""
    """Why no pod is made for now, though pods may exist; empty when they are."""


@runtime_checkable
class QueueingBackend(GangBackend, Protocol):
    """A backend with a queue: no pod exists before the queue has admitted the job."""

    def admit(self, job: RLHFJob, requests_hash: str, state: QueueState | None) -> QueueAdmission:
        """Return whether the job's pods may exist. `requests_hash` is `members.requests_hash` of its pods."""


class QueueObject(Protocol):
    """The object by which a queue knows a job, as far as it is remembered. An implementation is a frozen dataclass."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def uid(self) -> str:
        """Return its uid."""

    @property
    def version(self) -> int:
        """Return its resourceVersion."""

    @property
    def owner(self) -> str:
        """Return the uid of the object that controls it."""

    def at_version(self, version: int) -> "QueueObject":
        """Return the same object under another resourceVersion."""

    def leaving(self) -> "QueueObject":
        """Return the same object as one that is being deleted."""


Reference = tuple[str, str]
"""(kind with its apiVersion, name) of an object without a namespace that a queue's object names."""


class QueueApi(Protocol):
    """How the objects of a queue are read and written. Pure: whoever talks to the API server passes bodies."""

    def reads(self, kind: str) -> bool:
        """Return whether `kind`, named with its apiVersion, is the object by which the queue knows a job."""

    def object_names(self, job_name: str) -> Sequence[str]:
        """Return the names that such objects of the job of this name may have."""

    def current(self, objects: Sequence[QueueObject]) -> QueueObject:
        """Return the object that counts among those of one job."""

    def parse(self, body: Mapping[str, Any]) -> QueueObject:
        """Return the record of that object. Raises UnreadableError."""

    def references(self, version: str, stored: Mapping[str, Any], known: QueueObject | None) -> Sequence[Reference]:
        """Return what has to be read beside it. `version` is the queue's apiVersion, `stored` the stored RLHFJob."""

    def parse_reference(self, kind: str, body: Mapping[str, Any]) -> object:
        """Return the record of such an object. Raises UnreadableError."""

    def state(
        self, stored: Mapping[str, Any], known: QueueObject | None, records: Mapping[Reference, object]
    ) -> QueueState:
        """Return what the queue says of the job. `records` has None for what cannot be read."""

    def with_report(self, body: Json, report: WorkloadReport, now: str) -> Json:
        """Return the queue's object with the report in its status. Raises UnreadableError."""


@dataclass(frozen=True)
class GangChoice:
    """Which backend places a job, or why none can."""

    backend: GangBackend
    problem: str = ""
    """Why the job cannot be placed as it asks, and what would help; empty when it can."""
    reason: PlannedReason = PlannedReason.NOT_SERVED
    note: str = ""
    """What the user should know of a choice that was made for them."""
    waits: str = ""
    """Why a job that has not started must wait, and how it can go on: it asks for a queue that cannot be used."""


def with_scheduler(pod: Json, name: str | None) -> Json:
    """Return the pod, given to the scheduler of that name; None leaves it to the cluster."""
    return {**pod, "spec": {**pod["spec"], "schedulerName": name}} if name else pod


def labelled(pod: Json, labels: dict[str, str], annotations: dict[str, str] | None = None) -> Json:
    """Return the pod with more labels and annotations."""
    meta = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), **labels}}
    if annotations:
        meta["annotations"] = {**pod["metadata"].get("annotations", {}), **annotations}
    return {**pod, "metadata": meta}
