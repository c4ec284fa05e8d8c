"""One worker of a job: what it is, what it was asked and has not answered, and what it said of itself.

A command is pending from the moment it is sent until it is answered or the worker's session ends. A worker with a slow
one is busy. A worker that decodes and holds a training rank may be busy on either side.
Rule: plain data. The fleet opens and ends sessions; event handlers and actions change the rest. Must never outlive the
process that it stands for: what a process held is forgotten with it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_common.samples import Lease


class CommandKind(StrEnum):
    """What a command asks for, as far as scheduling needs to know."""

    BECOME = "become"
    LOAD = "load"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    MEASURE = "measure"
    CHECKPOINT = "checkpoint"
    WITHDRAW = "withdraw"
    MIGRATE = "migrate"
    OFFLOAD = "offload"
    SCORE_PREFIX = "score_prefix"
    UNKNOWN = "unknown"
    """A command of an earlier coordinator that still runs."""


SLOW_COMMANDS: Final = frozenset(
    {
        CommandKind.BECOME,
        CommandKind.LOAD,
        CommandKind.TRAIN,
        CommandKind.MEASURE,
        CommandKind.CHECKPOINT,
        CommandKind.UNKNOWN,
    }
)
"""A worker with one of these pending is busy: it gets no other command but Exit."""


WEIGHT_READS: Final = frozenset({"load_weights", "become_generation", "become_inference"})
"""Commands, by their names on the wire, in which a worker may read weights from training ranks."""


@dataclass(frozen=True, slots=True)
class LeavingSample:
    """A sample that a worker was asked to give away."""

    iteration: int
    sample: int
    source: Lease
    destination: Lease | None = None
    """Who gets it with its KV cache; None: its tokens come back to the queue."""


@dataclass(slots=True)
class PendingCommand:
    """A command that is not answered yet."""

    kind: CommandKind
    sent: float
    detail: str
    """What the worker is to do: the end of "waiting for generation-1 to ..."."""
    version: int = 0
    """The weight version that the worker holds after it."""
    model: str = ""
    """LOAD: the model role."""
    from_ranks: bool = False
    """It reads weights from training ranks, which therefore must not train."""
    role: str = ""
    """BECOME: the role that the worker then has. MEASURE: the role that is measured."""
    leaving: tuple[LeavingSample, ...] = ()
    """WITHDRAW, MIGRATE: the samples that leave."""


@dataclass(slots=True)
class Worker:
    """A worker that the job wants, and all that is known of it. Times are seconds of the monotonic clock."""

    name: str
    group: Group
    index: int
    rank: int | None = None
    """Its rank in the training group; None: it holds none."""
    session: int = 0
    """Number of its open session; 0: it is not connected."""
    seen: bool = False
    """It registered with this coordinator at some time."""
    lost: bool = False
    """Its session ended, or was silent, for too long."""
    leaving: bool = False
    """It was told to exit."""
    blameless: bool = False
    """Its end is no fault of what it decodes: it was asked to end, or its end is held against that already."""
    scorer_onloaded: bool = False
    """Generation workers: its scoring models may be in device memory, because it was given something to score."""
    refused: str = ""
    """Why the last process under its name was not let in: its version does not work with ours."""
    incarnation: str = ""
    address: str = ""
    rendezvous: str = ""
    device: str = ""
    draws_by_request: bool = False
    """It heeds how the tokens of a sample are to be drawn."""
    roles: frozenset[str] = frozenset()
    """What it has become: generation, inference, training."""
    versions: dict[str, int] = field(default_factory=dict)
    """Model -> the weight version that it decodes or scores by."""
    trained_version: int = 0
    """The weight version of its rank, which holds weights of its own."""
    group_epoch: int = 0
    schedule_table: str = ""
    """The schedule table that it trains by; empty: not known."""
    last_train: pb.TrainResult | None = None
    """The result of its last finished Train."""
    train_failure: pb.Failure | None = None
    """Why it could not join its group or train, after which the group has to start anew."""
    failed_at: float = 0.0
    pending: dict[int, PendingCommand] = field(default_factory=dict)
    failures: int = 0
    """How many commands failed in a row that may be tried again."""
    not_before: float = 0.0
    """It gets no new slow command before this time."""
    since: float = 0.0
    """When it entered its present state: connected, broken, lost, or missing."""
    last_heard: float = 0.0
    last_progress: float = 0.0
    """When its tokens last changed, a result came, or work was last given to it."""
    last_computing: float = 0.0
    """When its compute time last changed: it may be in one long computation, or stuck."""
    last_piece: float = 0.0
    """When it last finished a piece of training, or joined; it counts them if its heartbeat has a number."""
    restarts: int = 0
    draining_since: float = 0.0
    """When it first said that its machine asked it to end; 0: it did not. It stays while its rank may be needed."""
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    rates: tuple[float, float] = (0.0, 0.0)
    """(tokens per second, share of time busy) between the last two heartbeats."""

    @property
    def connected(self) -> bool:
        """Whether a session is open and it was not told to exit."""
        return self.session != 0 and not self.leaving

    def add_role(self, role: str) -> None:
        """Add a role to those that it has."""
        self.roles |= {role}

    @property
    def slow_command(self) -> PendingCommand | None:
        """The slow command that it is busy with, if any."""
        for item in self.pending.values():
            if item.kind in SLOW_COMMANDS:
                return item
        return None

    @property
    def rank_command(self) -> PendingCommand | None:
        """The slow command that its rank is busy with, if any, as far as is known."""
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
        """When the Train that it is busy with was sent; 0: it is busy with none."""
        slow = self.slow_command
        return slow.sent if slow is not None and slow.kind is CommandKind.TRAIN else 0.0

    @property
    def critic_update_pending(self) -> bool:
        """Whether its rank has trained the policy of an iteration, and not yet the critics."""
        last = self.last_train
        return last is not None and last.critics_behind and last.version == self.trained_version

    @property
    def trains(self) -> bool:
        """Whether it has joined a training group."""
        return Group.TRAINING in self.roles

    @property
    def idle(self) -> bool:
        """Whether it can be given a slow command now."""
        return self.connected and self.slow_command is None

    @property
    def asks_restart(self) -> bool:
        """Whether its failure says that it only needs its group to come back (a peer was lost)."""
        return self.train_failure is not None and self.train_failure.exit_code == ExitCode.RESTART

    def serves(self, version: int) -> bool:
        """Return whether its rank holds exactly this weight version, and gives it to whoever asks."""
        return self.connected and self.trains and self.trained_version == version and self.rank_command is None

    def keeps(self, version: int) -> bool:
        """Return whether its rank holds this weight version beside the one that it trains, for whoever asks."""
        return self.connected and self.trains and self.heartbeat.kept_version == version

    def forget(self) -> None:
        """Forget all that the process was: it is gone."""
        self.session = 0
        self.roles, self.versions, self.trained_version, self.group_epoch = frozenset(), {}, 0, 0
        self.pending, self.last_train, self.train_failure = {}, None, None
        self.leaving, self.draining_since = False, 0.0
        self.rates = (0.0, 0.0)
