"""One worker of a job: its identity, its pending commands, and its own reports.

Rule: plain data.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_common.samples import Lease


class CommandKind(StrEnum):
    """The kind of a command, as far as scheduling needs it."""

    BECOME = "become"
    LOAD = "load"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    ACCUMULATE = "accumulate"
    MEASURE = "measure"
    CHECKPOINT = "checkpoint"
    WITHDRAW = "withdraw"
    MIGRATE = "migrate"
    OFFLOAD = "offload"
    SCORE_PREFIX = "score_prefix"
    UNKNOWN = "unknown"
    """A command of an earlier session that is still running."""


SLOW_COMMANDS: Final = frozenset(
    {
        CommandKind.BECOME,
        CommandKind.LOAD,
        CommandKind.TRAIN,
        CommandKind.ACCUMULATE,
        CommandKind.MEASURE,
        CommandKind.CHECKPOINT,
        CommandKind.UNKNOWN,
    }
)
"""Commands that make a worker busy: while one is pending, `idle` is false."""


COUNTED_COMMANDS: Final = frozenset({CommandKind.TRAIN, CommandKind.ACCUMULATE})
"""Commands in which a rank reports finished units of work."""


WEIGHT_READS: Final = frozenset({"load_weights", "become_generation", "become_inference"})
"""Commands, by their names in `WorkerState.command`, in which a worker may read weights from training ranks."""


@dataclass(frozen=True, slots=True)
class LeavingSample:
    """A sample that a worker was asked to give away."""

    iteration: int
    sample: int
    source: Lease
    destination: Lease | None = None
    """Lease of the destination that gets it with its KV cache; None if its tokens return to the queue."""


@dataclass(slots=True)
class PendingCommand:
    """A command without an answer yet."""

    kind: CommandKind
    sent: float
    detail: str
    """Task of the worker in words: the end of "waiting for generation-1 to ..."."""
    version: int = 0
    """BECOME, LOAD: the weight version after it."""
    model: str = ""
    """LOAD: the model role."""
    from_ranks: bool = False
    """Whether it may read weights from training ranks."""
    role: str = ""
    """The new role for BECOME, or the role that measures or trains."""
    leaving: tuple[LeavingSample, ...] = ()
    """WITHDRAW, MIGRATE: the samples that leave."""


@dataclass(slots=True)
class Worker:
    """One worker and its known state. Times are seconds of the monotonic clock."""

    name: str
    group: Group
    index: int
    rank: int | None = None
    """Rank in the training group; None without one."""
    session: int = 0
    """Number of its open session; 0 while it is not connected."""
    seen: bool = False
    """Whether it ever registered with this coordinator."""
    lost: bool = False
    """Whether its session ended, or was silent, for too long, or it left."""
    leaving: bool = False
    """Whether it was asked to exit, until it registers again or is lost."""
    blameless: bool = False
    """Whether its end does not count as a failure of its samples: it was asked to end, or its end was already
    handled."""
    scorer_onloaded: bool = False
    """Whether scoring models may be in device memory: a session opened, or scoring work was sent, after the last
    Offload."""
    refused: str = ""
    """Incompatibility of the last process that registered under its name; empty if it is compatible."""
    incarnation: str = ""
    address: str = ""
    rendezvous: str = ""
    device: str = ""
    accumulates: bool = False
    """Whether its rank can compute gradients before the batch is complete."""
    draws_by_request: bool = False
    """Whether it applies the sampling settings of each request."""
    roles: frozenset[str] = frozenset()
    """Current roles: generation, inference, training."""
    versions: dict[str, int] = field(default_factory=dict)
    """Model -> the weight version with which it decodes or scores."""
    trained_version: int = 0
    """Weight version of its rank."""
    group_epoch: int = 0
    schedule_table: str = ""
    """Schedule table with which it trains; empty if unknown."""
    streamed: tuple[int, int] = (0, 0)
    """Iteration, and number of its chunks whose gradients its rank has, as far as known."""
    last_train: pb.TrainResult | None = None
    """Result of its last finished Train."""
    train_failure: pb.Failure | None = None
    """Failure of its rank that breaks the training group; None without one."""
    failed_at: float = 0.0
    pending: dict[int, PendingCommand] = field(default_factory=dict)
    failures: int = 0
    """Number of its failures that are compared with runPolicy.backoffLimit: failed commands to retry, and invalid
    messages."""
    not_before: float = 0.0
    """Moment before which it gets no role, no weights and no training group."""
    since: float = 0.0
    """Moment when its session last opened or ended, it was asked to exit, or it was lost; before that, when it was
    added."""
    last_heard: float = 0.0
    last_progress: float = 0.0
    """Moment of the last of these: its session opened, its tokens changed, it answered a command, its message about a
    sample was taken, or it got a command."""
    last_computing: float = 0.0
    """Moment when its session opened, or its reported compute time last changed."""
    last_piece: float = 0.0
    """Moment when its session opened, or its reported number of training units last changed."""
    restarts: int = 0
    draining_since: float = 0.0
    """Moment of the first heartbeat in its session that says it was asked to end; 0 before."""
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    rates: tuple[float, float] = (0.0, 0.0)
    """(tokens per second, share of time busy) between the last two heartbeats of this session; zeros before there are
    two."""

    @property
    def connected(self) -> bool:
        """Whether a session is open and the worker was not asked to exit."""
        return self.session != 0 and not self.leaving

    def add_role(self, role: str) -> None:
        """Add a role to the current ones."""
        self.roles |= {role}

    @property
    def slow_command(self) -> PendingCommand | None:
        """The pending slow command, if any."""
        for item in self.pending.values():
            if item.kind in SLOW_COMMANDS:
                return item
        return None

    @property
    def rank_command(self) -> PendingCommand | None:
        """The slow command of its rank, if any, as far as known. An Accumulate, which changes no weight, is left
        out."""
        for item in self.pending.values():
            own = (
                item.kind in (CommandKind.TRAIN, CommandKind.CHECKPOINT, CommandKind.UNKNOWN)
                or item.role == Group.TRAINING
            )
            if own and item.kind in SLOW_COMMANDS and not item.from_ranks:
                return item
        return None

    @property
    def training_since(self) -> float:
        """Moment when the Train or Accumulate was sent that is the pending slow command; 0 without one."""
        slow = self.slow_command
        return slow.sent if slow is not None and slow.kind in COUNTED_COMMANDS else 0.0

    def chunks_of(self, iteration: int) -> int:
        """Return the number of chunks of an iteration whose gradients its rank has, as far as known."""
        return self.streamed[1] if self.streamed[0] == iteration else 0

    @property
    def critic_update_pending(self) -> bool:
        """Whether its rank has trained the policy of an iteration, but not yet the critics."""
        last = self.last_train
        return last is not None and last.critics_behind and last.version == self.trained_version

    @property
    def trains(self) -> bool:
        """Whether it has the training role."""
        return Group.TRAINING in self.roles

    @property
    def idle(self) -> bool:
        """Whether it is connected and has no pending slow command."""
        return self.connected and self.slow_command is None

    @property
    def asks_restart(self) -> bool:
        """Whether its training failure has the exit code RESTART."""
        return self.train_failure is not None and self.train_failure.exit_code == ExitCode.RESTART

    def serves(self, version: int) -> bool:
        """Return whether its rank has exactly this weight version, and no slow command of its own."""
        return self.connected and self.trains and self.trained_version == version and self.rank_command is None

    def keeps(self, version: int) -> bool:
        """Return whether its rank reports that it keeps this weight version, above 0, beside the current one.

        Version 0 has no answer: 0 in a heartbeat also means that the rank keeps none. Workers load it from its folder.
        """
        return self.connected and self.trains and self.heartbeat.kept_version == version

    def forget(self) -> None:
        """Reset the session, the roles, the versions and the commands of a process that is gone."""
        self.session = 0
        self.roles, self.versions, self.trained_version, self.group_epoch = frozenset(), {}, 0, 0
        self.pending, self.last_train, self.train_failure, self.streamed = {}, None, None, (0, 0)
        self.leaving, self.draining_since = False, 0.0
        self.rates = (0.0, 0.0)
