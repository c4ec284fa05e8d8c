"""What reconcile returns: what is to be written, as data. Whoever carries it out writes the status first.

Rule: the status goes first because it holds the counts: a pod whose end is counted may be deleted afterwards, one that
is not would be forgotten.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_operator.gang.backend import WorkloadReport
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

Json = dict[str, Any]

SIDECAR_GRACE_SECONDS: Final = 10
"""Grace of a pod whose worker has ended: what runs beside it flushes its buffers, and saves nothing for the job."""


@dataclass(frozen=True)
class PodDeletion:
    """A pod to delete, if it is still the one that was observed."""

    name: str
    uid: str
    force: bool = False
    """Without waiting for its node, which is gone."""
    grace: int | None = None
    """Seconds, instead of those of the pod."""


@dataclass(frozen=True)
class JobEvent:
    """An event on the RLHFJob."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class PoolLabel:
    """A pod that joined or left the migration pool, if it is still the one that was observed."""

    name: str
    uid: str
    pooled: bool


@dataclass(frozen=True)
class ReconcilePlan:
    """What to do for one job. Empty: everything is as it should be."""

    status: Json | None = None
    """The whole status to write; None when what is there is right."""
    issue_certificates: bool = False
    """Issue a certificate into the job's Secret; pods are created once it is there."""
    resize: Mapping[str, int] | None = None
    """Group -> workers: the sizes to give to the coordinator."""
    apply: tuple[Json, ...] = ()
    delete: tuple[PodDeletion, ...] = ()
    labels: tuple[PoolLabel, ...] = ()
    """Labels of the migration pool to set or take away."""
    events: tuple[JobEvent, ...] = ()
    finalizer: bool | None = None
    """Set (True) or take away (False) the finalizer; None: leave it."""
    delete_job: bool = False
    withdraw: tuple[tuple[str, str], ...] = ()
    """(kind, name) of gang objects to delete."""
    report: WorkloadReport | None = None
    """What to write into the status of the queue's object."""
    requeue_after: float | None = None
    """Seconds until time alone changes the answer; None: never."""

    @property
    def idle(self) -> bool:
        """Return whether nothing is to be written."""
        written = self.status or self.issue_certificates or self.apply or self.delete or self.events or self.delete_job
        queued = self.withdraw or self.report is not None
        return not (written or queued or self.resize or self.labels or self.finalizer is not None)


def deletions(pods: Iterable[ObservedPod]) -> tuple[PodDeletion, ...]:
    """Return the deletion of each pod, with the grace that the pod has; a short one where its worker has ended."""
    return tuple(PodDeletion(pod.name, pod.uid, grace=SIDECAR_GRACE_SECONDS if pod.lingers else None) for pod in pods)
