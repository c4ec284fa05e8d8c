"""What the coordinator can decide to do: plain data that `actions` carries out, in order.

Rule: a decision says what, never how; it names workers and samples, and holds no clock, socket or file.
"""

from dataclasses import dataclass

from rlhf_api import control_pb2 as pb


@dataclass(frozen=True)
class Generate:
    """Hand queued samples to a worker."""

    worker: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Hand open scoring tasks to a worker: (sample, tasks) pairs, in one command."""

    worker: str
    samples: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class ScorePrefix:
    """Let a worker score what is known of unfinished samples."""

    worker: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Migrate:
    """Move samples from a worker to another with their KV cache."""

    source: str
    destination: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Withdraw:
    """Take samples back from a worker with their tokens, to be queued."""

    worker: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Offload:
    """Let a role of a worker leave device memory until it is needed."""

    worker: str
    role: str


@dataclass(frozen=True)
class MeasureCosts:
    """Let a worker measure what the work of one of its roles costs."""

    worker: str
    role: str


@dataclass(frozen=True)
class AdoptCosts:
    """Every generation worker has measured: plan by that from now on."""


@dataclass(frozen=True)
class PrepareWorker:
    """Give a worker its role, or new weights: a slow command."""

    worker: str
    command: pb.Command
    detail: str
    """End of the sentence "waiting for generation-1 to ..."."""
    version: int = 0
    model: str = ""
    """Of new weights for a role it has."""
    from_ranks: bool = False
    """It reads weights from training ranks."""


@dataclass(frozen=True)
class FormGroup:
    """Make one training group of all ranks, starting from a checkpoint's version."""

    group_epoch: int


@dataclass(frozen=True)
class MeasureSchedule:
    """Let all training ranks measure what the choice of a schedule needs next."""


@dataclass(frozen=True)
class Train:
    """Let a rank train on an iteration's batch."""

    worker: str
    iteration: int


@dataclass(frozen=True)
class ExitWorker:
    """Tell a worker to exit."""

    worker: str
    code: int
    reason: str


@dataclass(frozen=True)
class RestartGroup:
    """The training group is broken: every rank that is left comes back as a new process."""

    members: tuple[str, ...]
    reason: str
    counted: bool
    """A failure without a lost rank; limited by runPolicy.backoffLimit."""


@dataclass(frozen=True)
class CommitBatch:
    """Make the scored batch durable: training may start after it."""


@dataclass(frozen=True)
class CommitTrained:
    """Every rank holds the next version: write that down."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write a checkpoint of this version."""

    version: int


@dataclass(frozen=True)
class CloseIteration:
    """The iteration is over: metrics out, next segment and ledger."""


@dataclass(frozen=True)
class Finish:
    """The job ends: Complete, Failed or Stopped."""

    phase: str
    failure: pb.Failure | None = None


Decision = (
    Generate
    | Score
    | ScorePrefix
    | Migrate
    | Withdraw
    | Offload
    | MeasureCosts
    | AdoptCosts
    | PrepareWorker
    | FormGroup
    | MeasureSchedule
    | Train
    | ExitWorker
    | RestartGroup
    | CommitBatch
    | CommitTrained
    | SaveCheckpoint
    | CloseIteration
    | Finish
)
