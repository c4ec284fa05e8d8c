"""The interface of a gang backend: the objects of a gang, and the fields that make a pod a member. Rule: pure."""

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
        """Return whether it applies objects, and so needs the job's pods."""

    @property
    def immutable(self) -> bool:
        """Return whether its objects cannot be changed: a new one replaces them when no pod is left."""

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return the manifests to apply before the pods. `pods` has one pod of each group."""

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod as a member of the gang. The argument is not changed."""


@dataclass(frozen=True)
class QueueGate:
    """Whether the queue allows the pods of a job to exist."""

    open: bool
    reason: AdmittedReason
    message: str
    queue: str = "its queue"
    """Name of the queue, with its kind."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Group -> pods that may exist, for groups that want more pods than were admitted."""
    limited: str = ""
    """Reason why those groups do not grow."""
    superseded: tuple[str, ...] = ()
    """Names of the queue's objects that the job no longer needs, whichever pods it has."""
    renew: bool = False
    """Whether the job asks the queue anew: a new object replaces the queue's present one when no pod is left."""
    release: bool = False
    """Whether to release the reservation when no pod is left."""


@dataclass(frozen=True)
class WorkloadReport:
    """A report to a queue: conditions of its object, and whether the reservation is released."""

    conditions: Mapping[str, tuple[str, str, str]]
    """Type -> (status, reason, message)."""
    release: bool = False
    name: str = ""
    """Name of the queue's object; empty for all objects of the job."""


class QueueState(Protocol):
    """The observed state of the queue for a job."""

    def reserves(self, name: str) -> bool:
        """Return whether the queue's object of that name has a reservation or is being deleted; it must not change
        then.
        """

    @property
    def requests_hash(self) -> str:
        """Return the hash of the requests in the queue's object; empty if there is no object."""

    def report(self, gate: QueueGate, *, pods_left: bool, ready: bool) -> WorkloadReport | None:
        """Return the report to the queue about an unfinished job; None if there is nothing to report.

        `ready`: whether all pods that an iteration needs are ready.
        """

    def finished_report(self, message: str, *, succeeded: bool) -> WorkloadReport | None:
        """Return the report to the queue about a job that has ended; None if there is nothing to report."""


@dataclass(frozen=True)
class QueueAdmission:
    """A backend together with the decision of the queue."""

    backend: GangBackend
    """Backend that creates the queue's object and places pods where they were admitted."""
    gate: QueueGate
    blocked: str = ""
    """Reason besides the gate why no pod is created for now; empty if there is none."""


@runtime_checkable
class QueueingBackend(GangBackend, Protocol):
    """A backend with a queue, which decides whether the job's pods may exist."""

    def admit(self, job: RLHFJob, requests_hash: str, state: QueueState | None) -> QueueAdmission:
        """Return whether the job's pods may exist. `requests_hash` is `members.requests_hash` of its pods."""


class QueueObject(Protocol):
    """Record of the object that represents a job in a queue. An implementation is a frozen dataclass."""

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
        """Return the same object with another resourceVersion."""

    def leaving(self) -> "QueueObject":
        """Return the same object, marked as being deleted."""


Reference = tuple[str, str]
"""(kind with its apiVersion, name) of an object without a namespace to which a queue's object refers."""


class QueueApi(Protocol):
    """Reads and writes the objects of a queue. Pure: callers exchange the bodies with the API server."""

    def reads(self, kind: str) -> bool:
        """Return whether `kind`, with its apiVersion, is the queue's object of a job."""

    def object_names(self, job_name: str) -> Sequence[str]:
        """Return the possible names of the queue's objects for a job of this name."""

    def current(self, objects: Sequence[QueueObject]) -> QueueObject:
        """Return the object that counts among those of one job."""

    def parse(self, body: Mapping[str, Any]) -> QueueObject:
        """Return the record of the queue's object. Raises UnreadableError."""

    def references(
        self, version: str, stored: Mapping[str, Any], queue_object: QueueObject | None
    ) -> Sequence[Reference]:
        """Return the further objects to read. `version` is the queue's apiVersion, `stored` the stored RLHFJob."""

    def parse_reference(self, kind: str, body: Mapping[str, Any]) -> object:
        """Return the record of such an object. Raises UnreadableError."""

    def state(
        self, stored: Mapping[str, Any], queue_object: QueueObject | None, records: Mapping[Reference, object]
    ) -> QueueState:
        """Return the queue's state for the job. `records` has None for an object that cannot be read."""

    def with_report(self, body: Json, report: WorkloadReport, now: str) -> Json:
        """Return the queue's object with the report in its status. Raises UnreadableError."""


@dataclass(frozen=True)
class GangChoice:
    """The backend that places a job, or the reason why there is none."""

    backend: GangBackend
    problem: str = ""
    """Reason why the job cannot be placed as it asks, with a remedy; empty if it can."""
    reason: PlannedReason = PlannedReason.NOT_SERVED
    note: str = ""
    """Note for the user about parts of the job that have no effect; empty if there are none."""
    waits: str = ""
    """Reason why a job that has not started must wait, with a remedy: its queue cannot be used. Empty without one."""


def with_scheduler(pod: Json, name: str | None) -> Json:
    """Return the pod with that schedulerName; None changes nothing."""
    return {**pod, "spec": {**pod["spec"], "schedulerName": name}} if name else pod


def labelled(pod: Json, labels: dict[str, str], annotations: dict[str, str] | None = None) -> Json:
    """Return the pod with more labels and annotations."""
    meta = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), **labels}}
    if annotations:
        meta["annotations"] = {**pod["metadata"].get("annotations", {}), **annotations}
    return {**pod, "metadata": meta}
