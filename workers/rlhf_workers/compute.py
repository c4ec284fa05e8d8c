"""The compute thread of a worker: holds the roles, executes commands in order, and steps the roles.

Must never touch gRPC.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_workers.decode_watchdog import RunningStep, stack_of
from rlhf_workers.devices.arbiter import DeviceArbiter
from rlhf_workers.devices.device import unused_memory
from rlhf_workers.failures import WorkError, device_is_lost, failure_of
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.progress import stage
from rlhf_workers.role_builders import BUILDERS, build_role
from rlhf_workers.worker_role import (
    DecodesAhead,
    DraftsBySiblings,
    KvReceiver,
    Outbox,
    ReceivesSamples,
    ReportsBetweenSteps,
    WeightProvider,
    WorkerRole,
)

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.005
"""Seconds to wait for a command after a step without work, while samples or commands are unfinished."""

MAX_HINTS: Final = 64
"""Maximum sibling hints in the queue."""

T = TypeVar("T")
Build = Callable[[RLHFJob, pb.Command, torch.device, Path | None], WorkerRole]


@dataclass(frozen=True)
class WorkerSnapshot:
    """State of the worker when the compute thread last observed it."""

    roles: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    """Weight versions by model, from the roles that decode and score; without those at NO_VERSION."""
    trained_version: int = 0
    """Weight version of the training rank; 0 without that role."""
    group_epoch: int = 0
    active: int = 0
    learns_siblings: bool = False
    decodes_ahead: bool = False
    """Whether it drafts from the tokens of siblings on other workers."""


@dataclass(frozen=True)
class _Reset:
    samples: "Future[list[pb.SampleProgress]]"


@dataclass(frozen=True)
class _Call:
    """Work requested by another thread."""

    work: Callable[[], Any]
    answer: "Future[Any]"

    def run(self) -> Exception | None:
        """Run the work unless it was cancelled, and answer with its result or its error; return the error or None."""
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self.work())
            except Exception as error:
                self.answer.set_exception(error)
                return error
        return None

    def refuse(self, why: str) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(WorkError("SessionBroken", why, retryable=True))


_Item = pb.Command | pb.SiblingTokens | _Reset | _Call


class Compute:
    """Runs roles on one daemon thread."""

    def __init__(
        self,
        device: torch.device,
        outbox: SessionOutbox,
        certificates: Path | None,
        on_fatal: Callable[[pb.Failure], None],
        build: Build = build_role,
    ) -> None:
        """`on_fatal` is called from the compute thread when the process must end, as after a lost device or a failed
        step without a running command.
        """
        self.snapshot = WorkerSnapshot()
        self.weight_provider: WeightProvider | None = None
        self._device = device
        self._outbox = outbox
        self._certificates = certificates
        self._on_fatal = on_fatal
        self._build = build
        self._job: RLHFJob | None = None
        self._roles: dict[str, WorkerRole] = {}
        self._arbiter = DeviceArbiter(self._roles, unused=partial(unused_memory, device))
        self._group_epoch = 0
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._closing = False
        self._busy = 0.0
        self._since: float | None = None
        self.stepping: RunningStep | None = None
        """The role step that runs now, with its start time; None when none runs."""
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    # ------------------------------------------------------------ for other threads

    def start(self, job: RLHFJob) -> None:
        """Start the thread for a job."""
        self._job = job
        self._thread.start()

    def submit(self, command: pb.Command) -> None:
        """Queue a command; commands run in order of arrival."""
        with self._changed:
            self._queue.append(command)
            self._changed.notify()

    def learn(self, siblings: pb.SiblingTokens) -> None:
        """Queue sibling tokens for drafting; drop them when too many wait."""
        with self._changed:
            if sum(isinstance(item, pb.SiblingTokens) for item in self._queue) < MAX_HINTS:
                self._queue.append(siblings)
                self._changed.notify()

    def receive(self, work: "Callable[[KvReceiver, Outbox], T]") -> "Future[T]":
        """Call `work` on the compute thread with the role that takes samples from peers.

        The future fails with WorkError when no role takes samples, or when the session breaks first.
        """

        def call() -> T:
            role = next((role for role in self._roles.values() if isinstance(role, ReceivesSamples)), None)
            if role is None:
                raise WorkError("WrongRole", "this worker does not decode", retryable=True)
            self._arbiter.begin(role.name, "receive", self._outbox)
            return work(role.receiver, self._outbox)

        answer: Future[T] = Future()
        with self._changed:
            self._queue.append(_Call(call, answer))
            self._changed.notify()
        return answer

    def reset(self) -> "Future[list[pb.SampleProgress]]":
        """Drop the queue, and return a future of the samples that the roles give back.

        A later reset gives a waiting one an empty list.
        """
        reset = _Reset(Future())
        with self._changed:
            forgotten, self._queue = self._queue, deque([reset])
            self._changed.notify()
        for item in forgotten:
            if isinstance(item, _Reset):
                item.samples.set_result([])
            elif isinstance(item, _Call):
                item.refuse("the session with the coordinator broke")
        return reset.samples

    def queued_samples(self) -> int:
        """Return the number of samples in Generate and Score commands that still wait."""
        with self._changed:
            commands = [item for item in self._queue if isinstance(item, pb.Command)]
        return sum(len(command.generate.samples) + len(command.score.samples) for command in commands)

    def busy_seconds(self) -> float:
        """Return the compute seconds since the process started, including the running work."""
        return self.present_seconds() + self._busy

    def present_seconds(self) -> float:
        """Return the seconds since the running work began; 0 when idle."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    def stack(self) -> list[str]:
        """Return the innermost frames of the compute thread, the innermost last; empty when it does not run."""
        return stack_of(self._thread.ident)

    def roles(self) -> list[WorkerRole]:
        """Return the current roles, for a thread that only reads them."""
        return list(self._roles.values())

    def close(self, timeout: float) -> bool:
        """End the thread and close the roles; return False if it is still busy after `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread; calls that name no device use it
        worked = False
        while True:
            item = self._next(worked)
            if self._closing:
                break
            self._since = time.monotonic()
            try:
                with self._outbox.gathered():
                    worked = self._obey(item) if item is not None else self._step()
            except SystemExit as error:  # of a user's code; it would end the thread in silence
                self._fail(RuntimeError(f"the code called sys.exit({error.code!r})"), "the compute thread")
            if worked:
                self._busy += time.monotonic() - self._since
            self._since = None
            self._observe()
        for role in self._roles.values():
            role.close()

    def _next(self, worked: bool) -> _Item | None:
        """Return the next item of the queue; None to step the roles, or when closing with an empty queue."""
        with self._changed:
            while not self._queue and not self._closing:
                if worked:
                    return None
                waiting = self.snapshot.active or self._outbox.unanswered()
                if not self._changed.wait(POLL_SECONDS if waiting else None):
                    return None
            return self._queue.popleft() if self._queue else None

    def _obey(self, item: _Item) -> bool:
        if isinstance(item, pb.Command):
            self._execute(item)
        elif isinstance(item, _Call):
            error = item.run()
            if error is not None and device_is_lost(error):
                self._fail(error, "receiving a sample")
        else:
            try:
                if isinstance(item, _Reset):
                    self._give_back(item)
                else:
                    self._learn(item)
            except Exception as error:  # the thread must not end in silence
                self._fail(error, "giving samples back" if isinstance(item, _Reset) else "learning from siblings")
        return True

    def _learn(self, siblings: pb.SiblingTokens) -> None:
        for role in self._roles.values():
            if isinstance(role, DraftsBySiblings):
                role.learn(siblings)

    def _give_back(self, reset: _Reset) -> None:
        samples = [sample for role in self._roles.values() for sample in role.give_back()]
        self._outbox.reopen()
        reset.samples.set_result(samples)

    def _execute(self, command: pb.Command) -> None:
        name = str(command.WhichOneof("command"))
        if not self._outbox.begin(command.id, name):
            return
        try:
            if name in BUILDERS:
                self._become(name, command)
            else:
                role = self._role_for(name, command)
                self._arbiter.begin(role.name, name, self._outbox)
                role.handle(command, self._outbox)
        except Exception as error:
            self._log(error, f"command {name} failed")
            failure = failure_of(error, name)
            self._outbox.done(pb.CommandDone(command_id=command.id, failure=failure))
            if device_is_lost(error):
                self._end(failure)

    def _become(self, name: str, command: pb.Command) -> None:
        assert self._job is not None
        kind = name.removeprefix("become_")
        former = self._roles.pop(kind, None)
        if former is not None:
            former.close()
            if isinstance(former, WeightProvider) and self.weight_provider is former:
                self.weight_provider = None
        self._arbiter.begin(kind, name, self._outbox)
        started, start_ns = time.monotonic(), time.time_ns()
        with stage(f"building the {kind} role"):
            role = self._build(self._job, command, self._device, self._certificates)
        self._roles[role.name] = role
        if isinstance(role, WeightProvider):
            self.weight_provider = role
        if name == "become_training":
            self._group_epoch = command.become_training.group_epoch
        self._observe()
        log.info("holds role %s after %.1f s", role.name, time.monotonic() - started)
        self._outbox.span(f"become-{kind}", start_ns, time.time_ns(), 0)
        self._outbox.done(pb.CommandDone(command_id=command.id))

    def _role_for(self, name: str, command: pb.Command) -> WorkerRole:
        able = [role for role in self._roles.values() if name in role.handles]
        if name in ("measure", "offload"):
            wanted = command.measure.role or Group.TRAINING if name == "measure" else command.offload.role
            able = [role for role in able if role.name == wanted]
        if name == "load_weights" and len(able) > 1:
            able = [role for role in able if command.load_weights.model in role.versions()]
        if not able:
            roles = ", ".join(self._roles) or "no role"
            raise WorkError("WrongRole", f"command {name} came to a worker that holds {roles}", retryable=True)
        return able[0]

    def _step(self) -> bool:
        worked = False
        for role in sorted(self._roles.values(), key=lambda role: role.name != Group.GENERATION):
            try:
                if not worked:
                    self.stepping = role.name, time.monotonic()
                    worked = role.step(self._outbox)
                elif isinstance(role, ReportsBetweenSteps):
                    role.report(self._outbox)
            except Exception as error:
                self._log(error, f"role {role.name} failed")
                failure = failure_of(error, role.name)
                running = self._outbox.unanswered()
                for command in running:
                    self._outbox.done(pb.CommandDone(command_id=command, failure=failure))
                if not running or device_is_lost(error):
                    self._end(failure)
                    break
            finally:
                self.stepping = None
        return worked

    def _fail(self, error: Exception, work: str) -> None:
        self._log(error, f"{work} failed")
        self._end(failure_of(error, work))

    def _end(self, failure: pb.Failure) -> None:
        self._closing = True
        self._on_fatal(failure)

    def _observe(self) -> None:
        versions = {name: role.versions() for name, role in self._roles.items()}
        trained = max(versions.pop(Group.TRAINING, {}).values(), default=0)  # all models of a rank have one version
        used = {
            model: version
            for role_versions in versions.values()
            for model, version in role_versions.items()
            if version >= 0
        }
        active = sum(role.active() for role in self._roles.values())
        learns = any(isinstance(role, DraftsBySiblings) and role.learns_siblings for role in self._roles.values())
        ahead = any(isinstance(role, DecodesAhead) and role.decodes_ahead for role in self._roles.values())
        names = tuple(sorted(self._roles))
        self.snapshot = WorkerSnapshot(names, used, trained, self._group_epoch, active, learns, ahead)

    @staticmethod
    def _log(error: Exception, subject: str) -> None:
        expected = isinstance(error, WorkError)
        log.error("%s: %s", subject, error, exc_info=None if expected else error)
