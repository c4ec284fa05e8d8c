"""The workers of a job: who is wanted, who is there, what each is and does, and when one counts as lost.

A worker is missing until it registers, then connected (a session is open), broken (the session ended; it has a moment
of grace to come back), or lost. A new process under a worker's name (another incarnation) is a restart: whatever the
old one held is gone at once. A second *live* process under one name is refused: workers were started wrongly.
Rule: pure; the time comes in. Must never decide what a worker should do: that is `iteration.decide`.
When the process dies nothing of this is kept: workers register again and say what they still are.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode, Group, worker_name
from rlhf_api.rules.table import MAX_WORKERS
from rlhf_operator.coordinator.world.sample import Handout

GRACE_SECONDS: Final = 2.0
"""A broken session may be a hiccup: a worker dials again within a second; waiting longer only delays its samples."""

BEATS_A_SECOND: Final = 64
"""Heartbeats of all workers together: each costs a fraction of a millisecond, and a stream's end is seen at once."""

MISSED_BEATS: Final = 3
"""A session silent for so many beats may be half dead: a new incarnation takes its name over, it is not refused."""


class Work(StrEnum):
    """What a command asks for, as far as deciding needs to know."""

    BECOME = "become"
    LOAD = "load"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    MEASURE = "measure"
    CHECKPOINT = "checkpoint"
    WITHDRAW = "withdraw"
    MIGRATE = "migrate"
    PARK = "park"
    PREFIX = "prefix"
    UNKNOWN = "unknown"
    """A command of an earlier coordinator that still runs."""


SLOW_WORK: Final = frozenset({Work.BECOME, Work.LOAD, Work.TRAIN, Work.MEASURE, Work.CHECKPOINT, Work.UNKNOWN})
"""A worker with one of these pending is busy: it gets no other command but Exit."""


LOADS: Final = frozenset({"load_weights", "become_generation", "become_inference"})
"""Commands, by their names on the wire, in which a worker may read weights from training ranks."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A sample that a worker was asked to give away."""

    iteration: int
    sample: int
    source: Handout
    destination: Handout | None = None
    """With its KV cache; None: its tokens come back."""


@dataclass(slots=True)
class Pending:
    """A command that is not answered yet."""

    work: Work
    sent: float
    detail: str
    """End of the sentence "waiting for generation-1 to ..."."""
    version: int = 0
    """Weight version after it."""
    model: str = ""
    """Load: the model role."""
    from_ranks: bool = False
    """It reads weights from training ranks, which therefore must not train."""
    role: str = ""
    """Become: the role it then has. Measure: the role that is measured."""
    leaving: tuple[Leaving, ...] = ()
    """Withdraw, Migrate: of which samples."""


@dataclass(slots=True)
class Worker:
    """One wanted worker."""

    name: str
    group: Group
    index: int
    rank: int | None = None
    """Of the training group; None: it holds none."""
    session: int = 0
    """0: not connected."""
    seen: bool = False
    """It registered with this coordinator at some time."""
    lost: bool = False
    leaving: bool = False
    """It was told to exit."""
    awake: bool = False
    """Generation workers: its scoring models may be in device memory, since it was given something to score."""
    incarnation: str = ""
    address: str = ""
    rendezvous: str = ""
    device: str = ""
    role: str = ""
    """Several are joined by "+"."""
    versions: dict[str, int] = field(default_factory=dict)
    """Model -> weight version that it decodes and scores by."""
    trained_version: int = 0
    """Weight version of its rank, which is one of its own."""
    group_epoch: int = 0
    table: str = ""
    """The schedule table it trains by, when that is known."""
    trained: pb.TrainResult | None = None
    """Result of its last finished Train."""
    train_failure: pb.Failure | None = None
    """It could not join its group or train: the group has to start anew."""
    failed_at: float = 0.0
    pending: dict[int, Pending] = field(default_factory=dict)
    failures: int = 0
    """Retryable command failures in a row."""
    not_before: float = 0.0
    """No new slow command before this time."""
    since: float = 0.0
    """When it entered its present state: connected, broken, lost, or missing."""
    heard: float = 0.0
    moved: float = 0.0
    """When its tokens last changed, a result came, or work was last given to it."""
    breathed: float = 0.0
    """When its compute time last changed: it may be in one long computation, or stuck."""
    restarts: int = 0
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    rates: tuple[float, float] = (0.0, 0.0)
    """(tokens per second, share of time busy) between the last two heartbeats."""

    @property
    def connected(self) -> bool:
        """A session is open and it is not on its way out."""
        return self.session != 0 and not self.leaving

    @property
    def roles(self) -> frozenset[str]:
        """What it is: generation, inference, training; it may be several."""
        return frozenset(self.role.split("+")) - {""}

    def add_role(self, role: str) -> None:
        """It became this too."""
        self.role = "+".join(sorted(self.roles | {role}))

    @property
    def slow(self) -> Pending | None:
        """The slow command it is busy with."""
        for item in self.pending.values():
            if item.work in SLOW_WORK:
                return item
        return None

    @property
    def rank_work(self) -> Pending | None:
        """The slow command that its rank is busy with, as far as that is known."""
        for item in self.pending.values():
            own = item.work in (Work.TRAIN, Work.CHECKPOINT, Work.UNKNOWN) or item.role == Group.TRAINING
            if own and item.work in SLOW_WORK and not item.from_ranks:
                return item
        return None

    @property
    def trains(self) -> bool:
        """It is a rank of a training group."""
        return Group.TRAINING in self.roles

    @property
    def idle(self) -> bool:
        """It can be given a slow command now."""
        return self.connected and self.slow is None

    @property
    def asks_restart(self) -> bool:
        """Its failure says that it only needs its group to come back (a peer was lost)."""
        return self.train_failure is not None and self.train_failure.exit_code == ExitCode.RESTART

    def serves(self, version: int) -> bool:
        """Its rank has exactly these weights, and gives them to whoever asks."""
        return self.connected and self.trains and self.trained_version == version and self.rank_work is None


@dataclass(frozen=True, slots=True)
class Joined:
    """A registration was accepted."""

    worker: Worker
    restarted: bool
    """Another process than before: it has nothing of what the old one held."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A registration was refused, and why."""

    reason: str
    known: bool
    """The name is wanted, but somebody else has it."""


class Fleet:
    """All wanted workers by name."""

    def __init__(self, spec: RLHFJobSpec, now: float) -> None:
        self.timeout = float(spec.run_policy.worker_timeout_seconds)
        self.workers: dict[str, Worker] = {}
        """Everybody who was wanted at some time: late messages of those who left find themselves here."""
        self.sizes = wanted(spec)
        self.rank_group, self.world_size = spec.rank_group, spec.training.ranks
        self._add_missing(now)
        self.heartbeat = min(self.timeout / 6, max(1.0, len(self.workers) / BEATS_A_SECOND))
        """Seconds between two heartbeats of a worker."""

    def of(self, group: Group) -> list[Worker]:
        """Workers of a group by index."""
        return [worker for worker in self if worker.group is group]

    def ranks(self) -> list[Worker]:
        """Who holds the ranks of the training group, by rank."""
        return self.of(self.rank_group)[: self.world_size]

    def __iter__(self) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if not self._retired(worker))

    def resize(self, replicas: Mapping[str, int], now: float) -> bool:
        """Sets the sizes of the generation and inference groups; False when they are so already.

        Raises ValueError naming the group when it cannot have that size. A worker beyond the size counts, and what it
        holds is its own, until it is lost.
        """
        sizes = dict(self.sizes)
        for name, count in replicas.items():
            if name not in (Group.GENERATION, Group.INFERENCE) or name not in self.sizes:
                raise ValueError(f"group {name!r} cannot be resized: give generation or inference, if the job has it")
            least = 0 if name == Group.INFERENCE else 1  # generation workers can score too
            least = self.world_size if name == self.rank_group else least
            if not least <= count <= MAX_WORKERS:
                holds = ", the first of which hold the training ranks" if name == self.rank_group else ""
                raise ValueError(f"{name} = {count}: must be {least} to {MAX_WORKERS}{holds}")
            sizes[Group(name)] = count
        if sizes == self.sizes:
            return False
        retired = {worker.name for worker in self.workers.values() if self._retired(worker)}
        self.sizes = sizes
        self._add_missing(now, retired)
        return True

    def _add_missing(self, now: float, retired: Collection[str] = ()) -> None:
        """Who left and is wanted again is a new worker."""
        for group, count in self.sizes.items():
            for index in range(count):
                name = worker_name(group, index)
                if name not in self.workers or name in retired:
                    rank = index if group is self.rank_group and index < self.world_size else None
                    self.workers[name] = Worker(name, group, index, rank, since=now)

    def _retired(self, worker: Worker) -> bool:
        """Beyond its group's size, and gone: nobody waits for it."""
        return worker.index >= self.sizes[worker.group] and (worker.lost or not worker.seen)

    def register(self, message: pb.Register, session: int, now: float) -> Joined | Refused:
        """Opens a session; the caller takes back what an earlier process or session of the name held."""
        worker = self.workers.get(message.worker)
        if (
            worker is None
            or self._retired(worker)
            or (message.group, message.index) != (worker.group.value, worker.index)
        ):
            names = ", ".join(each.name for each in self)
            return Refused(f"worker {message.worker!r} is not part of this job; it wants {names}", known=False)
        same = worker.incarnation == message.incarnation
        if not message.incarnation:
            return Refused(f"worker {message.worker} registered without an incarnation", known=False)
        if worker.session and not same and not worker.leaving and now - worker.heard < MISSED_BEATS * self.heartbeat:
            return Refused(f"worker {message.worker} is already connected from another live process", known=True)
        restarted = worker.seen and not same
        worker.restarts += restarted
        self._open(worker, message, session, now, keep=worker.trained if same else None)
        return Joined(worker, restarted)

    def _open(
        self, worker: Worker, message: pb.Register, session: int, now: float, keep: pb.TrainResult | None
    ) -> None:
        state = message.state
        worker.session, worker.seen, worker.lost, worker.leaving = session, True, False, False
        worker.incarnation, worker.address = message.incarnation, message.address
        worker.rendezvous, worker.device = message.rendezvous, message.device
        worker.role, worker.versions = state.role, dict(state.versions)
        worker.trained_version, worker.group_epoch = state.trained_version, state.group_epoch
        worker.trained = state.last_train if state.HasField("last_train") else keep
        worker.train_failure, worker.table = None, ""
        worker.pending, worker.awake = {}, True
        if state.busy:
            detail = "finish the command of its last session"
            pending = Pending(Work.UNKNOWN, now, detail, from_ranks=state.command in LOADS)
            worker.pending[state.command_id] = pending
        worker.since = worker.heard = worker.moved = worker.breathed = now
        worker.heartbeat, worker.rates = pb.Heartbeat(), (0.0, 0.0)

    def closed(self, name: str, session: int, now: float) -> bool:
        """A session ended; False when the worker has a newer one already."""
        worker = self.workers[name]
        if worker.session != session:
            return False
        worker.session, worker.since = 0, now
        return True

    def beat(self, name: str, heartbeat: pb.Heartbeat, now: float) -> None:
        """A heartbeat arrived: rates follow from the difference to the one before."""
        worker = self.workers[name]
        before, seconds = worker.heartbeat, now - worker.heard
        if before.tokens != heartbeat.tokens:
            worker.moved = now
        if before.busy_seconds != heartbeat.busy_seconds:
            worker.breathed = now
        if seconds > 0 and before.ByteSize():
            busy = (heartbeat.busy_seconds - before.busy_seconds) / seconds
            worker.rates = ((heartbeat.tokens - before.tokens) / seconds, min(1.0, max(0.0, busy)))
        worker.heartbeat, worker.heard = heartbeat, now

    def expire(self, now: float) -> list[Worker]:
        """Marks as lost who was silent or broken for too long, and returns them; their sessions are over."""
        gone = [worker for worker in self if worker.seen and not worker.lost and self._is_gone(worker, now)]
        for worker in gone:
            forget(worker)
            worker.lost, worker.since = True, now
        return gone

    def _is_gone(self, worker: Worker, now: float) -> bool:
        if worker.session:
            return now - worker.heard > self.timeout
        return worker.leaving or now - worker.since > GRACE_SECONDS


def forget(worker: Worker) -> None:
    """The process is gone, and with it all it was."""
    worker.session = 0
    worker.role, worker.versions, worker.trained_version, worker.group_epoch = "", {}, 0, 0
    worker.pending, worker.trained, worker.train_failure = {}, None, None
    worker.leaving = False
    worker.rates = (0.0, 0.0)


def wanted(spec: RLHFJobSpec) -> dict[Group, int]:
    """Workers of each group; a group that no task of the graph runs in does not exist."""
    counts = {
        Group.GENERATION: spec.generation.replicas,
        Group.INFERENCE: spec.inference.replicas,
        Group.TRAINING: spec.training.ranks,
    }
    if spec.rank_group is not Group.TRAINING:
        del counts[Group.TRAINING]
    graph = graph_of(spec)
    return {group: count for group, count in counts.items() if graph.tasks_of(group)}
