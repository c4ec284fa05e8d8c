"""The observed pod: a small record of the fields that decisions read.

Rule: data only, and small, because a job may have thousands of pods.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from rlhf_common import names
from rlhf_operator.reconcile.observed.termination_log import FinalReport

PATIENCE: Final = timedelta(seconds=10)
"""Age up to which a pod without a node, or with scheduling gates, is not reported."""
INIT_FAILED: Final = "Init:Error"
"""Reason of a pod with a failing init container, as in kubectl."""
INIT_RUNS: Final = "Init:Running"
"""Reason of a pod with a running init container; the message has its name and start."""
IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Reasons of a container whose image cannot be pulled."""
CONFIG_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", INIT_FAILED}
)
"""Reasons of a container that cannot be started in its present form."""
CREATING: Final = "ContainerCreating"
"""Reason of a container that the kubelet has not created yet."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """The end of our container, or of the whole pod (then `code` is None, or 0 if the pod succeeded)."""

    id: str
    """Unique id of this end."""
    code: int | None
    reason: str
    """OOMKilled, Error, Completed; for a pod Evicted, UnexpectedAdmissionError, ..."""
    message: str
    """The last lines of the log or of the container's message, or the kubelet's message about the pod's end."""
    at: datetime | None
    report: FinalReport | None = None
    """Final report of a coordinator."""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """The observed fields of one pod."""

    name: str
    uid: str
    group: names.Group
    index: int
    phase: str
    """Pending, Running, Succeeded, Failed, Unknown."""
    owner: str = ""
    """uid of the object that controls it; empty if there is none."""
    version: int = field(default=0, compare=False)
    """resourceVersion; larger is newer. It is ignored in comparisons."""
    epoch: int = 0
    ready: bool = False
    address: str = ""
    created: datetime | None = None
    deletion: datetime | None = None
    """End of its grace period, once its deletion is requested."""
    grace: int = 0
    """Length of the grace period in seconds, once its deletion is requested; else 0."""
    unschedulable: str = ""
    """The scheduler's message if no node fits; else empty."""
    unscheduled: datetime | None = None
    """Time since when no node fits."""
    scheduled: datetime | None = None
    """Time when it got its node."""
    waiting: str = ""
    """Reason why our container waits: ImagePullBackOff, CrashLoopBackOff, ContainerCreating, ..."""
    waiting_message: str = ""
    running: datetime | None = None
    """Start of our running container."""
    end: PodEnd | None = None
    """The latest end of our container, or of the pod."""
    template_hash: str = ""
    """`template_hash` of its group when it was created; empty for a pod older than these hashes."""
    pooled: bool = False
    """Whether it has the label of the migration pool."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of its conditions, without those of a normal start."""
    done: bool = False
    """Whether our container has ended and the kubelet will not restart it, even if other containers run."""
    accompanied: bool = False
    """Whether another container of the pod has not ended."""
    finalizers: tuple[str, ...] = ()
    """Finalizers for which the API server keeps the pod after its end; the operator sets none."""
    gates: tuple[str, ...] = ()
    """Scheduling gates that keep the scheduler from considering it."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, or OutOfcpu, NodeLost, ...: not the job's fault."""
    disruption_message: str = ""
    """Message of that disruption."""
    began: datetime | None = None
    """Start of our container's current or last run."""

    @property
    def run_id(self) -> str:
        """Return an id of the pod and of the latest end of our container; each run of our container has another."""
        return f"{self.uid}/{self.end.id if self.end is not None else ''}"

    @property
    def over(self) -> bool:
        """Return whether our container will never run again."""
        return self.done or self.phase in ("Succeeded", "Failed")

    @property
    def lingers(self) -> bool:
        """Return whether another container still runs although ours has ended permanently."""
        return self.done and self.accompanied

    @property
    def active(self) -> bool:
        """Return whether it runs or may run, and its deletion is not requested."""
        return not self.over and self.deletion is None

    def stuck(self, now: datetime) -> bool:
        """Return whether no node fits the active pod, whose age is at least PATIENCE or unknown."""
        return bool(self.unschedulable) and self.active and (self.created is None or now - self.created >= PATIENCE)

    def gated(self, now: datetime) -> bool:
        """Return whether scheduling gates block the active pod, whose age is at least PATIENCE or unknown."""
        return bool(self.gates) and self.active and (self.created is None or now - self.created >= PATIENCE)

    @property
    def deletion_asked(self) -> datetime | None:
        """Return the time of the deletion request; None if there was none."""
        return None if self.deletion is None else self.deletion - timedelta(seconds=self.grace)
