"""A pod as reconcile sees it: a small record of what decisions read, not the body. `pod_parsing` makes it.

Rule: data only. A thousand pods a job are kept in memory as these.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from rlhf_common import names
from rlhf_operator.reconcile.observed.termination_log import FinalReport

PATIENCE: Final = timedelta(seconds=10)
"""Time a new pod may be without a node: claims are bound, and nodes appear, within seconds."""
INIT_FAILED: Final = "Init:Error"
"""Reason of a pod whose init container fails, as kubectl shows it; the kubelet runs it again."""
INIT_RUNS: Final = "Init:Running"
"""Reason of a pod whose init container runs and is not done; the message has its name and since when."""
IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Reasons of a container whose image cannot be had."""
CONFIG_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", INIT_FAILED}
)
"""Reasons of a container that cannot be started as it is."""
CREATING: Final = "ContainerCreating"
"""Reason of a container whose image or volumes are not there yet."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """Our container ended, or the pod failed as a whole (then `code` is None)."""

    id: str
    """Tells this end from every other."""
    code: int | None
    reason: str
    """OOMKilled, Error, Completed; of a pod Evicted, UnexpectedAdmissionError, ..."""
    message: str
    """The last lines of the log, or why the kubelet ended it."""
    at: datetime | None
    report: FinalReport | None = None
    """Of a coordinator: its last one."""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """What is observed of one pod."""

    name: str
    uid: str
    group: names.Group
    index: int
    phase: str
    """Pending, Running, Succeeded, Failed, Unknown."""
    owner: str = ""
    """uid of the object that controls it; empty: none does."""
    version: int = field(default=0, compare=False)
    """resourceVersion; a later one is newer. Two that differ in nothing else are the same to every decision."""
    epoch: int = 0
    ready: bool = False
    address: str = ""
    created: datetime | None = None
    deletion: datetime | None = None
    """When its grace ends, once its deletion is asked for."""
    grace: int = 0
    """Seconds of that grace."""
    unschedulable: str = ""
    """The scheduler's words when no node can take it."""
    unscheduled: datetime | None = None
    """Since when."""
    scheduled: datetime | None = None
    """When it got its node."""
    waiting: str = ""
    """Reason our container waits: ImagePullBackOff, CrashLoopBackOff, ContainerCreating, ..."""
    waiting_message: str = ""
    running: datetime | None = None
    """Since when our container runs."""
    end: PodEnd | None = None
    """The newest end of our container, or of the pod."""
    template_hash: str = ""
    """Of the user's template that it was made from; empty: made before there were any."""
    pooled: bool = False
    """It carries the label of the migration pool."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of its conditions, but for those that every pod goes through when it starts."""
    done: bool = False
    """Our container has ended for good: the kubelet does not start it again, whatever else runs in the pod."""
    accompanied: bool = False
    """A container beside ours has not ended."""
    finalizers: tuple[str, ...] = ()
    """Names for which the API server keeps the pod after its end; the operator sets none."""
    gates: tuple[str, ...] = ()
    """Names of the scheduling gates that keep the scheduler from looking at it."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, or OutOfcpu, NodeLost, ...: not the job's fault."""
    disruption_message: str = ""
    """What is said of that disruption."""
    began: datetime | None = None
    """When our container's present run began, or its last one."""

    @property
    def over(self) -> bool:
        """Return whether the pod has ended and never runs again."""
        return self.done or self.phase in ("Succeeded", "Failed")

    @property
    def lingers(self) -> bool:
        """Return whether a container beside ours still runs although ours has ended for good."""
        return self.done and self.accompanied

    @property
    def active(self) -> bool:
        """Return whether it runs or may run, and nobody asked for its deletion."""
        return not self.over and self.deletion is None

    def stuck(self, now: datetime) -> bool:
        """Return whether no node can take it, and not only because volumes are still being bound."""
        return bool(self.unschedulable) and self.active and (self.created is None or now - self.created >= PATIENCE)

    def gated(self, now: datetime) -> bool:
        """Return whether a scheduling gate keeps it back, for longer than whoever admits pods needs."""
        return bool(self.gates) and self.active and (self.created is None or now - self.created >= PATIENCE)

    @property
    def deletion_asked(self) -> datetime | None:
        """Return when its deletion was asked for; None: it was not."""
        return None if self.deletion is None else self.deletion - timedelta(seconds=self.grace)
