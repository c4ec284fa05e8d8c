"""The input of reconcile besides the stored job and the time. Rule: data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from rlhf_common.names import Group
from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import QueueState
from rlhf_operator.manifests import Images
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision
from rlhf_operator.untrusted import DeletedObject, UnreadableObject

NOT_AT_WORK: Final = frozenset({"Starting", "Recovering"})
"""Phases of a coordinator that waits for workers."""


@dataclass(frozen=True)
class CoordinatorReading:
    """The coordinator's status (`JobStatus` of control.proto) and the time of its reading."""

    at: datetime
    phase: str
    iteration: int
    iterations: int
    run_id: str = ""
    """`ObservedPod.run_id` of the coordinator that answered; empty if it is unknown."""
    working: Mapping[str, int] = field(default_factory=dict)
    """Group -> workers that are Ready or Busy."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Group -> workers that the coordinator wants."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds_left: float = 0.0
    last_checkpoint: str = ""
    waiting_for: tuple[str, ...] = ()
    sample_failures: tuple[str, ...] = ()
    """Samples of the iteration on which workers failed, with the consequence, newest first."""
    lost_trackers: tuple[str, ...] = ()
    """Trackers that this coordinator gave up, with the reason, newest first."""
    warnings: tuple[str, ...] = ()
    """The coordinator's warnings at the job's start."""
    pool: tuple[str, ...] = ()
    """Workers of the migration pool."""
    threshold: int = 0
    """Number of unfinished samples at which the tail moves; 0: never."""
    released: int = 0
    """Number of generation workers that score now."""
    streams: int = 0
    """Number of workers with a session with the coordinator."""
    lock_shared: bool = False
    """Whether other nodes see the lock of the journal."""
    lock_doubt: str = ""
    """Reason to doubt that they see it; empty if there is none."""
    silent: Mapping[str, datetime] = field(default_factory=dict)
    """Workers that the coordinator has lost -> time of their last message."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """Engine with the reason for its choice -> number of workers that decode with it."""
    fusion: str = ""
    """Summary of the current inter-stage fusion."""
    long_rounds: str = ""
    """Reason why the job has long rounds or none; empty unless rollout.longRounds is Auto."""
    speculation: str = ""
    """Summary of the effect of drafts, with numbers."""
    speculation_switched: str = ""
    """Time and reason of the last switch of drafting; empty if this coordinator has not switched it."""
    predicted_seconds: float = 0.0
    """Predicted seconds of generation and inference with that fusion; 0 if not predicted."""

    plan_drift: str = ""
    """How the predictions of the plan for spec.devices stopped to hold, and what follows; empty before."""
    device_plan: str = ""
    """Plan for spec.devices as JSON; empty without one."""

    def says_else(self, other: "CoordinatorReading") -> bool:
        """Return whether a later reading is news: it differs in more than times and the seconds left.

        For a coordinator at work, the list that it waits for does not count.
        """
        same: dict[str, Any] = {"at": self.at, "seconds_left": self.seconds_left, "silent": self.silent}
        if self.phase not in NOT_AT_WORK:
            same["waiting_for"] = self.waiting_for
        return self.silent.keys() != other.silent.keys() or replace(other, **same) != self


@dataclass(frozen=True)
class ObservedJob:
    """The cluster from the view of one job."""

    pods: Mapping[str, ObservedPod] = field(default_factory=dict)
    """Name -> pod, for all pods with the job's label that it controls."""
    ended: tuple[ObservedPod, ...] = ()
    """Deleted pods of the job that no reconcile has accounted for yet."""
    taken: frozenset[str] = frozenset()
    """Names of pods that are not in `pods`: pods of an earlier job of the same name, of somebody else, or unreadable.
    """
    unreadable: tuple[tuple[str, UnreadableObject], ...] = ()
    """(kind, what) of objects of the job that cannot be read."""
    deleted: tuple[DeletedObject, ...] = ()
    """Objects other than pods that are being deleted and that finalizers delay."""
    applied: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(kind, name) -> fingerprint of the applied manifest, for existing objects other than pods."""
    stored_revision: StoredRevision = field(default_factory=StoredRevision)
    """The stored revision in the job's ConfigMap."""
    certificates_expire: datetime | None = None
    """Time to replace the certificate in the job's Secret; None if no usable Secret is known."""
    reading: CoordinatorReading | None = None
    """Latest reading of a coordinator, perhaps of one that is gone; `current_reading` leaves such a reading out."""
    unreachable: str = ""
    """Reason why the last reading of the coordinator failed."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Object name -> why it was not written the last time."""
    api_failure: str = ""
    """Message about several consecutive reconciles that an error of the API server ended; empty if there is none."""
    occupied: Mapping[str, str] = field(default_factory=dict)
    """Objects of others with names that the job needs: `Service job` -> `service/job`, its name for kubectl."""
    dry_run_problem: str = ""
    """Reason why a dry run of the job's pods was refused; empty if it was not."""
    status_written: datetime | None = None
    """Time when this process last wrote the status."""
    images: Images = field(default_factory=Images)
    home: str = ""
    """Namespace of the operator; empty outside the cluster."""
    served: ServedApis = field(default_factory=ServedApis)
    """APIs of schedulers and queues that can be used."""
    queue: QueueState | None = None
    """State of the queue for the job, also for a job that names no queue; None if no backend has a queue."""

    @property
    def current_reading(self) -> CoordinatorReading | None:
        """Return the latest reading; None without one, or if the process that answered has ended or its pod is gone."""
        if self.reading is None or not self.reading.run_id:
            return self.reading
        runs = {pod.run_id for pod in self.pods.values() if pod.group == Group.COORDINATOR}
        return self.reading if self.reading.run_id in runs else None
