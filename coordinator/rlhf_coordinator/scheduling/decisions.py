"""The decisions of the coordinator: plain data that `actions` carries out, in order.

Rule: a decision contains no clock, socket or file.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.state.sibling_state import TokenSource
from rlhf_planner.inter_stage.balance import Reallocation


@dataclass(frozen=True)
class Generate:
    """Lease queued samples to a worker for decoding."""

    worker: str
    samples: tuple[int, ...]
    evaluation: bool = False
    """Whether the samples are those of the evaluation, by their index in it, or those of the batch."""


@dataclass(frozen=True)
class Score:
    """Lease open scoring tasks to a worker, in one command."""

    worker: str
    samples: tuple[tuple[int, tuple[str, ...]], ...]
    """(sample, its tasks) pairs."""
    evaluation: bool = False
    """Whether the samples are those of the evaluation, by their index in it, or those of the batch."""


@dataclass(frozen=True)
class ScoreGroup:
    """Lease an open task of a prompt's group to a worker, with all samples of the group."""

    worker: str
    group: int
    task: str


@dataclass(frozen=True)
class ScorePrefix:
    """Let a worker score the known tokens of unfinished samples."""

    worker: str
    samples: tuple[int, ...]


class SharedPart(NamedTuple):
    """Tokens of a source, response positions `start` to before `stop`, that a worker has from now on."""

    group: int
    worker: str
    source: TokenSource
    start: int
    stop: int
    sent: bool
    """Whether they are sent to the worker; otherwise it decodes the sample itself."""


@dataclass(frozen=True)
class ShareSiblings:
    """Send workers draft hints for the prompts whose samples they decode, and set the next round."""

    parts: tuple[SharedPart, ...]
    forgotten: tuple[tuple[int, str], ...]
    """(prompt group, worker that no longer decodes any of it) pairs."""
    next_group: int
    next_share: float
    """Moment before which no full round begins."""


@dataclass(frozen=True)
class DraftAhead:
    """Let a worker decode samples of the next iteration as drafts."""

    worker: str
    samples: tuple[int, ...]
    """Numbers of the samples in the next iteration."""


@dataclass(frozen=True)
class EndDrafts:
    """Withdraw all drafts that a worker decodes ahead."""

    worker: str


@dataclass(frozen=True)
class Migrate:
    """Move samples from one worker to another with their KV cache."""

    source: str
    destination: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Withdraw:
    """Withdraw samples with their tokens from a worker, to be queued."""

    worker: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class CutGroups:
    """Leave surplus prompts out of the iteration."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class NoteReallocation:
    """Record the destination and the predicted gain of samples that move to balance two workers."""

    reallocation: Reallocation


@dataclass(frozen=True)
class Offload:
    """Let a worker offload the models of a role to host memory until they are needed."""

    worker: str
    role: str


@dataclass(frozen=True)
class MeasureCosts:
    """Let a worker measure the cost of work in one of its roles."""

    worker: str
    role: str


@dataclass(frozen=True)
class AdoptCosts:
    """Use the measured costs from now on."""


@dataclass(frozen=True)
class PrepareWorker:
    """Give a worker a role, or new weights for a role that it has: a slow command."""

    worker: str
    command: pb.Command
    detail: str
    """Task of the worker in words: the end of "waiting for generation-1 to ..."."""
    version: int = 0
    model: str = ""
    """Model that gets new weights; empty when the worker gets a role."""
    from_ranks: bool = False
    """Whether the worker reads weights from training ranks."""


@dataclass(frozen=True)
class FormGroup:
    """Form one training group of all ranks, which starts from the newest checkpoint, or else from the manifest's
    models."""

    group_epoch: int


@dataclass(frozen=True)
class MeasureSchedule:
    """Let all training ranks take the next measurement for the choice of a schedule."""


@dataclass(frozen=True)
class Train:
    """Let a rank train on an iteration's batch."""

    worker: str
    iteration: int
    part: pb.TrainPart.ValueType = pb.TRAIN_PART_ALL
    keep: bool = False
    """Whether the rank must keep the weights with which it begins, because workers decode with them."""


@dataclass(frozen=True)
class StreamGroups:
    """Journal the next prompts whose gradients ranks add before the batch is complete."""

    groups: tuple[int, ...]
    """Numbers of the prompts, in the order of the sum."""


@dataclass(frozen=True)
class Accumulate:
    """Let a rank compute the gradients of the first chunks of the batch in progress."""

    worker: str
    iteration: int
    chunks: int
    """Total number of chunks so far."""


@dataclass(frozen=True)
class ExitWorker:
    """Tell a worker to exit."""

    worker: str
    code: int
    reason: str
    stuck: bool = False
    """Whether the worker makes no progress, which counts as a failure of the samples that it decodes."""


@dataclass(frozen=True)
class RestartGroup:
    """Record that a broken training group restarts; each connected member gets an ExitWorker after it."""

    members: tuple[str, ...]
    reason: str
    counted: bool
    """Whether this counts towards runPolicy.backoffLimit."""


@dataclass(frozen=True)
class CommitBatch:
    """Make the scored batch durable before training."""


@dataclass(frozen=True)
class CommitTrained:
    """Record that every rank has the next version, or its policy."""


@dataclass(frozen=True)
class ReportCritics:
    """Complete the open report of the previous iteration, whose training is complete now."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Save a checkpoint of this version."""

    version: int


@dataclass(frozen=True)
class CloseIteration:
    """Close the iteration, and begin the next segment and ledger unless it was the last."""

    last: bool = False
    """Whether this is the job's last iteration."""
    awaits: Literal["", "training", "critics"] = ""
    """Training that is still pending, after which the report is completed; empty for none."""
    late_critics: bool = False
    """Whether the critics were trained after the policy, so that the metrics of training are read again."""


@dataclass(frozen=True)
class BeginEvaluation:
    """Begin the evaluation of the job's last version."""

    version: int


@dataclass(frozen=True)
class GiveUpEvaluation:
    """Abandon the evaluation of a version that no worker has any more."""

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
    | DraftAhead
    | EndDrafts
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
    | StreamGroups
    | Accumulate
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
