"""What reconcile is given with the job: everything that was observed of it, as of one moment.

Rule: data only. What is not known is absent, never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import QueueState
from rlhf_operator.manifests import Images
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision
from rlhf_operator.untrusted import UnreadableObject


@dataclass(frozen=True)
class CoordinatorReading:
    """The coordinator's own status (`JobStatus` of control.proto), and when it was read."""

    at: datetime
    phase: str
    iteration: int
    iterations: int
    working: Mapping[str, int] = field(default_factory=dict)
    """Group -> workers that are Ready or Busy."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Group -> workers that the coordinator wants."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds_left: float = 0.0
    last_checkpoint: str = ""
    waiting_for: tuple[str, ...] = ()
    sample_failures: tuple[str, ...] = ()
    """Of the iteration: samples that workers failed on, and what follows, newest first."""
    lost_trackers: tuple[str, ...] = ()
    """Trackers of metrics that this coordinator gave up, and why, newest first."""
    warnings: tuple[str, ...] = ()
    """What the coordinator warned of at the job's start."""
    pool: tuple[str, ...] = ()
    """Workers of the migration pool."""
    threshold: int = 0
    """Unfinished samples at which the tail moves; 0: never."""
    released: int = 0
    """Generation workers that score meanwhile."""
    streams: int = 0
    """Workers that hold a session with the coordinator."""
    lock_shared: bool = False
    """Other nodes see the lock of the journal."""
    lock_doubt: str = ""
    """Why that is not known."""
    silent: Mapping[str, datetime] = field(default_factory=dict)
    """Workers that the coordinator has lost -> when it last heard of them."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """Engine and why it is this one, in words -> workers that decode by it."""
    fusion: str = ""
    """The inter-stage fusion in force, in words."""
    speculation: str = ""
    """What drafts do, in words with numbers."""
    speculation_switched: str = ""
    """When and why drafting was last switched off or on; empty: this coordinator has not seen it."""
    predicted_seconds: float = 0.0
    """Of generation and inference under it; 0: not predicted."""


@dataclass(frozen=True)
class ObservedJob:
    """The world as far as one job is concerned."""

    pods: Mapping[str, ObservedPod] = field(default_factory=dict)
    """Name -> pod; all that carry the job's label and are controlled by it."""
    ended: tuple[ObservedPod, ...] = ()
    """Pods of it that were deleted and are gone, and that no reconcile has accounted for yet."""
    taken: frozenset[str] = frozenset()
    """Names of pods that are not in `pods`: those of an earlier job of the same name, which are on their way out, those
    of somebody else, and those that cannot be read."""
    unreadable: tuple[tuple[str, UnreadableObject], ...] = ()
    """(kind, what) of objects of the job that cannot be read."""
    applied: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(kind, name) -> fingerprint of what was applied, of the objects other than pods that exist."""
    stored_revision: StoredRevision = field(default_factory=StoredRevision)
    """What the job's ConfigMap holds of what it runs by."""
    certificates_expire: datetime | None = None
    """When the certificate in the job's Secret should be replaced; None when there is no usable Secret."""
    reading: CoordinatorReading | None = None
    unreachable: str = ""
    """Why the coordinator could not be read the last time."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Object name -> why the API server refused it the last time it was applied."""
    occupied: Mapping[str, str] = field(default_factory=dict)
    """`Service job` -> `service/job`, as kubectl has it: what others have under names that the job's objects need."""
    dry_run_problem: str = ""
    """Why the API server would take no pods made from the job's templates, by a dry run; empty: it would."""
    status_written: datetime | None = None
    """When this process last wrote the status."""
    images: Images = field(default_factory=Images)
    home: str = ""
    """The operator's namespace; empty where it runs outside of the cluster."""
    served: ServedApis = field(default_factory=ServedApis)
    """APIs of schedulers and queues that can be used."""
    queue: QueueState | None = None
    """What the job's queue says of it; None when no queue says anything."""
