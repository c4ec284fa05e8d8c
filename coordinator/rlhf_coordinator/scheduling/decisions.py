"""What the coordinator can decide to do: plain data that `actions` carries out, in order.

Rule: a decision names workers and samples, and holds no clock, socket or file. What it takes to carry one out
(attempts, command ids, tokens, times) is added by the action.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.state.sibling_state import TokenSource
from rlhf_planner.inter_stage.balance import Reallocation


@dataclass(frozen=True)
class Generate:
    """Lease queued samples to a worker to decode."""

    worker: str
    samples: tuple[int, ...]
    evaluation: bool = False
    """Whether they are samples of the evaluation, by their index in it; else of the batch."""


@dataclass(frozen=True)
class Score:
    """Lease open scoring tasks to a worker, in one command."""

    worker: str
    samples: tuple[tuple[int, tuple[str, ...]], ...]
    """(sample, its tasks) pairs."""
    evaluation: bool = False
    """Whether they are samples of the evaluation, by their index in it; else of the batch."""


@dataclass(frozen=True)
class ScoreGroup:
    """Lease an open task of a prompt's group to a worker, with all samples of the group."""

    worker: str
    group: int
    task: str


@dataclass(frozen=True)
class ScorePrefix:
    """Let a worker score the tokens that are known of unfinished samples."""

    worker: str
    samples: tuple[int, ...]


class SharedPart(NamedTuple):
    """Tokens of a source, response positions `start` to `stop`, that a worker has from now on."""

    group: int
    worker: str
    source: TokenSource
    start: int
    stop: int
    sent: bool
    """They go to it; else it decodes the sample itself."""


@dataclass(frozen=True)
class ShareSiblings:
    """Tell workers what others decoded of the prompts that they decode samples of."""

    parts: tuple[SharedPart, ...]
    forgotten: tuple[tuple[int, str], ...]
    """(prompt group, worker that decodes nothing of it any more) pairs."""
    next_group: int
    next_share: float
    """When it is looked at again."""


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
class CutGroups:
    """Let the iteration go on without prompts that were begun beyond those of the batch."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class NoteReallocation:
    """Samples move to balance two workers: keep where they are to go, and what that is predicted to give."""

    reallocation: Reallocation


@dataclass(frozen=True)
class Offload:
    """Let a worker offload the models of a role to host memory until they are needed."""

    worker: str
    role: str


@dataclass(frozen=True)
class MeasureCosts:
    """Let a worker measure what the work of one of its roles costs."""

    worker: str
    role: str


@dataclass(frozen=True)
class AdoptCosts:
    """Every generation worker has measured: go by these costs from now on."""


@dataclass(frozen=True)
class PrepareWorker:
    """Give a worker a role, or new weights for a role that it has: a slow command."""

    worker: str
    command: pb.Command
    detail: str
    """What the worker is to do: the end of "waiting for generation-1 to ..."."""
    version: int = 0
    model: str = ""
    """The model that gets new weights; empty: the worker gets a role."""
    from_ranks: bool = False
    """Whether the worker reads weights from training ranks."""


@dataclass(frozen=True)
class FormGroup:
    """Make one training group of all ranks, which starts from the version of the newest checkpoint."""

    group_epoch: int


@dataclass(frozen=True)
class MeasureSchedule:
    """Let all training ranks measure what the choice of a schedule needs next."""


@dataclass(frozen=True)
class Train:
    """Let a rank train on an iteration's batch."""

    worker: str
    iteration: int
    part: pb.TrainPart.ValueType = pb.TRAIN_PART_ALL
    keep: bool = False
    """Workers decode by the weights that it begins with, and may have to load them meanwhile."""


@dataclass(frozen=True)
class ExitWorker:
    """Tell a worker to exit."""

    worker: str
    code: int
    reason: str
    stuck: bool = False
    """It does not get on with its work, which may be the fault of what it decodes."""


@dataclass(frozen=True)
class RestartGroup:
    """The training group is broken: its checkpoint in progress is lost. Every rank that is left gets an ExitWorker."""

    members: tuple[str, ...]
    reason: str
    counted: bool
    """Whether this is a failure without a lost rank, of which runPolicy.backoffLimit are allowed."""


@dataclass(frozen=True)
class CommitBatch:
    """Make the scored batch durable: training may start after it."""


@dataclass(frozen=True)
class CommitTrained:
    """Write down that every rank holds the next version."""


@dataclass(frozen=True)
class ReportCritics:
    """Write down what the iteration before came to, now that its critics are trained."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write a checkpoint of this version."""

    version: int


@dataclass(frozen=True)
class CloseIteration:
    """Close the iteration: report its metrics, and begin the next segment and ledger unless it was the last."""

    last: bool = False
    """Of the job, which then ends."""
    awaits: Literal["", "training", "critics"] = ""
    """What is still to be trained beside the next iteration, and completes the report; empty: nothing."""
    late_critics: bool = False
    """Whether its critics were trained after its policy, so that the metrics of training are read again."""


@dataclass(frozen=True)
class BeginEvaluation:
    """Begin to evaluate the job's last version."""

    version: int


@dataclass(frozen=True)
class GiveUpEvaluation:
    """No worker holds the version that is evaluated any more: the next one is evaluated in its place."""

    version: int


@dataclass(frozen=True)
class Finish:
    """End the job: Complete, Failed or Stopped."""

    phase: str
    failure: pb.Failure | None = None


Decision = (
    Generate
    | Score
    | ScoreGroup
    | ScorePrefix
    | ShareSiblings
    | Migrate
    | Withdraw
    | CutGroups
    | NoteReallocation
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
    | ReportCritics
    | SaveCheckpoint
    | CloseIteration
    | BeginEvaluation
    | GiveUpEvaluation
    | Finish
)
