"""The result of reconcile: what to write, as data.

The controller writes the status first, because it has the counts: a pod may be deleted once its end is counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_operator.gang.backend import WorkloadReport
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

Json = dict[str, Any]

SIDECAR_GRACE_SECONDS: Final = 10
"""Grace period in seconds of a pod whose worker has ended; its other containers save nothing for the job."""


@dataclass(frozen=True)
class PodDeletion:
    """A pod to delete, unless it was replaced since it was observed."""

    name: str
    uid: str
    force: bool = False
    """Whether to delete without waiting for its kubelet."""
    grace: int | None = None
    """Grace period in seconds that replaces the pod's own."""


@dataclass(frozen=True)
class JobEvent:
    """An event on the RLHFJob."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class PoolLabel:
    """A pod whose label of the migration pool changes, unless it was replaced since it was observed."""

    name: str
    uid: str
    pooled: bool


@dataclass(frozen=True)
class ReconcilePlan:
    """The actions for one job. An empty plan means that nothing is to be written."""

    status: Json | None = None
    """The whole status to write; None if the stored one is right."""
    issue_certificates: bool = False
    """Whether to issue a certificate into the job's Secret; pods are created once it exists."""
    resize: Mapping[str, int] | None = None
    """Group -> workers: sizes to send to the coordinator."""
    apply: tuple[Json, ...] = ()
    delete: tuple[PodDeletion, ...] = ()
    labels: tuple[PoolLabel, ...] = ()
    """Labels of the migration pool to set or remove."""
    events: tuple[JobEvent, ...] = ()
    finalizer: bool | None = None
    """Add (True) or remove (False) the finalizer; None: no change."""
    delete_job: bool = False
    withdraw: tuple[tuple[str, str], ...] = ()
    """(kind, name) of gang objects to delete."""
    report: WorkloadReport | None = None
    """Report to write into the status of the queue's object."""
    requeue_after: float | None = None
    """Seconds until time alone may change the plan, or a retry is due; None: never."""

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to write."""
        written = self.status or self.issue_certificates or self.apply or self.delete or self.events or self.delete_job
        queued = self.withdraw or self.report is not None
        return not (written or queued or self.resize or self.labels or self.finalizer is not None)


def deletions(pods: Iterable[ObservedPod]) -> tuple[PodDeletion, ...]:
    """Return the deletion of each pod with the pod's own grace period, or a short one if its worker has ended."""
    return tuple(PodDeletion(pod.name, pod.uid, grace=SIDECAR_GRACE_SECONDS if pod.lingers else None) for pod in pods)
