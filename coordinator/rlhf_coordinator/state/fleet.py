"""The workers of a job: which are wanted, which are connected, and when a worker counts as lost.

A worker is missing, connected (a session is open), broken (its session ended, and it has a grace period to return), or
lost. Rule: pure; the time is an argument.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.protocol import PROTOCOL, mismatch
from rlhf_api.rules.table import MAX_WORKERS
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group, worker_name
from rlhf_common.worker_roles import roles_of
from rlhf_coordinator.state.hang_detection import HangDetector
from rlhf_coordinator.state.worker import WEIGHT_READS, CommandKind, PendingCommand, Worker

GRACE_SECONDS: Final = 2.0
"""Grace period of a broken session in seconds."""

HEARTBEATS_PER_SECOND: Final = 64
"""Heartbeats per second of all workers together, above which their interval grows, to at most a sixth of the
time-out."""

MAX_MISSED_HEARTBEATS: Final = 3
"""Missed heartbeats after which a new incarnation may take over the name of a silent session."""


@dataclass(frozen=True, slots=True)
class Joined:
    """An accepted registration."""

    worker: Worker
    restarted: bool
    """Whether another process registered under the name before."""


class Cause(Enum):
    """Reason for refusing a registration, as far as the worker acts on it."""

    UNKNOWN = "unknown"
    """The worker does not belong to the job, its registration is invalid, or the job is over."""
    TAKEN = "taken"
    """The name is wanted, but another process has it."""
    INCOMPATIBLE = "incompatible"
    """The worker's version is incompatible with the coordinator's."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused registration, with the reason."""

    reason: str
    cause: Cause = Cause.UNKNOWN


class Fleet:
    """The workers of a job. Iteration yields those that are wanted, and others that registered and are not lost."""

    def __init__(self, spec: RLHFJobSpec, now: float) -> None:
        self.timeout = float(spec.run_policy.worker_timeout_seconds)
        self.workers: dict[str, Worker] = {}
        """All workers that were wanted since this process started, by name."""
        self.sizes = wanted(spec)
        self.rank_group, self.world_size = spec.rank_group, spec.training.ranks
        self.pace = HangDetector()
        self._streams = spec.training.stream != "Disabled"
        self._add_missing(now)
        self.heartbeat = min(self.timeout / 6, max(1.0, len(self.workers) / HEARTBEATS_PER_SECOND))
        """Seconds between two heartbeats of a worker, from the number of workers at the start."""

    def in_group(self, group: Group) -> list[Worker]:
        """Return the workers of a group that iteration yields, by index."""
        return [worker for worker in self if worker.group is group]

    def ranks(self) -> list[Worker]:
        """Return the workers of the training ranks, by rank."""
        return self.in_group(self.rank_group)[: self.world_size]

    def __iter__(self) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if not self._retired(worker))

    def resize(self, replicas: Mapping[str, int], now: float) -> bool:
        """Set the sizes of the generation and inference groups; return False if nothing changes.

        A registered worker beyond the size stays until it is lost. Raises ValueError naming a group that cannot have
        that size.
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
        """Add the missing workers; a worker that left and is wanted again starts without state."""
        for group, count in self.sizes.items():
            for index in range(count):
                name = worker_name(group, index)
                if name not in self.workers or name in retired:
                    rank = index if group is self.rank_group and index < self.world_size else None
                    self.workers[name] = Worker(name, group, index, rank, since=now)

    def _retired(self, worker: Worker) -> bool:
        """Return whether the worker is beyond its group's size, and lost or never registered."""
        return worker.index >= self.sizes[worker.group] and (worker.lost or not worker.seen)

    def register(self, message: pb.Register, session: int, now: float) -> Joined | Refused:
        """Open a session; return the worker, or the reason for refusing it.

        The caller revokes the leases of an earlier session of the name.
        """
        worker = self.workers.get(message.worker)
        if (
            worker is None
            or self._retired(worker)
            or (message.group, message.index) != (worker.group.value, worker.index)
        ):
            names = ", ".join(wanted_worker.name for wanted_worker in self)
            return Refused(f"worker {message.worker!r} is not part of this job; it wants {names}")
        same = worker.incarnation == message.incarnation
        worker.refused = mismatch(message.worker, message.protocol, PROTOCOL)
        if self._streams and worker.rank is not None and not message.accumulates:
            worker.refused = (
                f"{message.worker} is of a release without spec.training.stream: name the coordinator's release in the "
                "pod template of its group, or set the field to Disabled in the suspended job"
            )
        if worker.refused:
            return Refused(worker.refused, Cause.INCOMPATIBLE)
        if not message.incarnation:
            return Refused(f"worker {message.worker} registered without an incarnation")
        if (
            worker.session
            and not same
            and not worker.leaving
            and now - worker.last_heard < MAX_MISSED_HEARTBEATS * self.heartbeat
        ):
            return Refused(f"worker {message.worker} is already connected from another live process", Cause.TAKEN)
        restarted = worker.seen and not same
        worker.restarts += restarted
        self._open(worker, message, session, now, keep=worker.last_train if same else None)
        return Joined(worker, restarted)

    def _open(
        self, worker: Worker, message: pb.Register, session: int, now: float, keep: pb.TrainResult | None
    ) -> None:
        state = message.state
        worker.session, worker.seen, worker.lost, worker.leaving = session, True, False, False
        worker.blameless = False
        worker.incarnation, worker.address = message.incarnation, message.address
        worker.rendezvous, worker.device = message.rendezvous, message.device
        worker.draws_by_request, worker.accumulates = message.draws_by_request, message.accumulates
        worker.roles, worker.versions = roles_of(state), dict(state.versions)
        worker.trained_version, worker.group_epoch = state.trained_version, state.group_epoch
        worker.last_train = state.last_train if state.HasField("last_train") else keep
        worker.train_failure, worker.schedule_table, worker.streamed = None, "", (0, 0)
        worker.pending, worker.scorer_onloaded = {}, True
        if state.busy:
            detail = "finish the command of its last session"
            kind = CommandKind.ACCUMULATE if state.command == CommandKind.ACCUMULATE else CommandKind.UNKNOWN
            pending = PendingCommand(kind, now, detail, from_ranks=state.command in WEIGHT_READS)
            worker.pending[state.command_id] = pending
        worker.since = worker.last_heard = worker.last_progress = worker.last_computing = now
        worker.last_piece = now
        worker.heartbeat, worker.rates, worker.draining_since = pb.Heartbeat(), (0.0, 0.0), 0.0

    def closed(self, name: str, session: int, now: float) -> bool:
        """End a session; return False when it is not the worker's open one."""
        worker = self.workers[name]
        if worker.session != session:
            return False
        worker.session, worker.since = 0, now
        return True

    def beat(self, name: str, heartbeat: pb.Heartbeat, now: float) -> None:
        """Record a heartbeat; rates follow from the difference to the previous one."""
        worker = self.workers[name]
        before, seconds = worker.heartbeat, now - worker.last_heard
        if before.tokens != heartbeat.tokens:
            worker.last_progress = now
        if before.busy_seconds != heartbeat.busy_seconds:
            worker.last_computing = now
        if before.training_pieces != heartbeat.training_pieces:
            worker.last_piece = now
            if worker.training_since:
                self.pace.moved(worker.training_since, now)
        if heartbeat.leaving and not worker.draining_since:
            worker.draining_since = now
            worker.blameless = True
        if seconds > 0 and before.ByteSize():
            busy = (heartbeat.busy_seconds - before.busy_seconds) / seconds
            worker.rates = ((heartbeat.tokens - before.tokens) / seconds, min(1.0, max(0.0, busy)))
        worker.heartbeat, worker.last_heard = heartbeat, now

    def expire(self, now: float) -> list[Worker]:
        """Mark workers as lost that were silent or broken for too long, or that left; return them. Their sessions are
        over."""
        gone = [worker for worker in self if worker.seen and not worker.lost and self._is_gone(worker, now)]
        for worker in gone:
            worker.forget()
            worker.lost, worker.since = True, now
        return gone

    def _is_gone(self, worker: Worker, now: float) -> bool:
        if worker.session:
            return now - worker.last_heard > self.timeout
        return worker.leaving or now - worker.since > GRACE_SECONDS


def wanted(spec: RLHFJobSpec) -> dict[Group, int]:
    """Return the size of each group at the start.

    A group without a task in the graph has no entry, nor has training where the ranks are in another group.
    """
    counts = {
        Group.GENERATION: spec.generation.replicas,
        Group.INFERENCE: spec.inference.replicas,
        Group.TRAINING: spec.training.ranks,
    }
    if spec.rank_group is not Group.TRAINING:
        del counts[Group.TRAINING]
    graph = graph_of(spec)
    return {group: count for group, count in counts.items() if graph.tasks_of(group)}
