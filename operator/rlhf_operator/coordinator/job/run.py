"""One running job: all its mutable parts in one place, for the modules that change them.

Rule: state only. `intake` changes it by what workers say, `effects` by what was decided, `loop` runs the two in turn.
Everything here lives on the event loop's one thread.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from rlhf_api import control_pb2 as pb
from rlhf_operator.coordinator.deciding.schedule import candidates, question
from rlhf_operator.coordinator.job.accounts import Accounts
from rlhf_operator.coordinator.job.recorder import Recorder
from rlhf_operator.coordinator.job.sessions import Sessions
from rlhf_operator.coordinator.storage.journal import Journal
from rlhf_operator.coordinator.storage.prompts import PromptSet
from rlhf_operator.coordinator.storage.restore import Restored
from rlhf_operator.coordinator.world.fleet import Fleet
from rlhf_operator.coordinator.world.fusion_state import fusion_state
from rlhf_operator.coordinator.world.sample import ITEM_BYTES
from rlhf_operator.coordinator.world.world import Plan, World

COMMANDS_PER_COORDINATOR = 1 << 32
"""Command ids of a coordinator start at its epoch times this, so an answer to an earlier one's is never mistaken."""


@dataclass
class Outcome:
    """How the job ended."""

    phase: str
    failure: pb.Failure | None = None


@dataclass
class Totals:
    """Counters of this process, for metrics."""

    tokens: int = 0
    samples: int = 0
    stale: int = 0
    messages: int = 0
    group_restarts: int = 0
    moved_kv: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A job and its coordinator's parts."""

    plan: Plan
    world: World
    journal: Journal
    prompts: PromptSet
    recorder: Recorder
    sessions: Sessions
    accounts: Accounts
    coordinator_epoch: int
    started_ns: int
    rewards: list[float]
    training_metrics: dict[str, float]
    last_metrics: dict[str, float]
    command_ids: "itertools.count[int]"
    totals: Totals = field(default_factory=Totals)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = 0.0
    """When the first message arrived that was not decided on yet; 0: none."""
    outcome: Outcome | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    search: "asyncio.Task[None] | None" = None
    """For training schedules; here so that it is not collected while it runs."""
    choosing: "asyncio.Task[None] | None" = None
    """For the tail of the iteration; likewise."""
    replaying: "asyncio.Task[None] | None" = None
    """The iteration before, with and without incremental scoring; likewise."""

    def wake(self) -> None:
        """Something changed: decide again."""
        self.arrived = self.arrived or time.monotonic()
        self.changed.set()

    def event(self, kind: str, message: str, **attributes: str) -> None:
        """Writes down that something happened."""
        self.recorder.event(time.time_ns(), kind, message, **attributes)


def begin_run(plan: Plan, restored: Restored, journal: Journal, prompts: PromptSet, recorder: Recorder) -> Run:
    """The parts of a job that goes on from `restored`."""
    now = time.monotonic()
    world = World(
        Fleet(plan.spec, now),
        restored.ledger,
        fusion_state(plan.spec),
        trained=restored.trained,
        checkpoint=restored.checkpoint,
        lengths=restored.lengths,
    )
    take_prompts(world, prompts)
    if restored.schedule.get("question") == question(plan.spec, plan.schedule):
        world.schedule.take(restored.schedule)
    elif candidates(plan.spec):
        world.schedule.stage = "stages"
    deadline = plan.spec.run_policy.active_deadline_seconds
    if deadline is not None:
        world.deadline = now + deadline - (time.time_ns() - restored.started_ns) / 1e9
    begun = now if restored.begun_ns is None else now - max(0.0, (time.time_ns() - restored.begun_ns) / 1e9)
    return Run(
        plan=plan,
        world=world,
        journal=journal,
        prompts=prompts,
        recorder=recorder,
        sessions=Sessions(),
        accounts=Accounts(begun, phase_begun=now),
        coordinator_epoch=restored.coordinator_epoch,
        started_ns=restored.started_ns,
        rewards=restored.rewards,
        training_metrics=restored.training_metrics,
        last_metrics=restored.last_closed[1] if restored.last_closed else {},
        command_ids=itertools.count(restored.coordinator_epoch * COMMANDS_PER_COORDINATOR + 1),
    )


def take_prompts(world: World, prompts: PromptSet) -> None:
    """The world knows the prompts of the ledger's iteration."""
    world.prompt_tokens, world.prompt_lines = prompts_of(prompts, world.iteration, len(world.ledger.samples))


def prompts_of(prompts: PromptSet, iteration: int, size: int) -> tuple[list[int], list[int]]:
    """(tokens, line of the prompt file) of the prompt of every sample of an iteration."""
    batch = [prompts.of(iteration, index) for index in range(size)]
    return [len(prompt.tokens) // ITEM_BYTES for prompt in batch], [prompt.line for prompt in batch]
