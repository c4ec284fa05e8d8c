"""One running job: all its mutable parts in one place, for the modules that change them.

Rule: state only. `event_handlers` changes it by what workers say, `actions` by what was decided, `loop` runs the two in
turn. Everything here lives on the event loop's one thread.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.job.background_tasks import BackgroundTasks
from rlhf_coordinator.job.iteration_times import IterationTimes
from rlhf_coordinator.job.recorder import Recorder
from rlhf_coordinator.job.sessions import Sessions
from rlhf_coordinator.scheduling.iteration import SchedulerOutput
from rlhf_coordinator.scheduling.schedule import candidates, question
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import fusion_state
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompts import PromptSet
from rlhf_coordinator.storage.restore import Restored

COMMANDS_PER_COORDINATOR = 1 << 32
"""Command ids of a coordinator start at its epoch times this, so an answer to an earlier one's is never mistaken."""


@dataclass
class JobOutcome:
    """How the job ended."""

    phase: str
    failure: pb.Failure | None = None


@dataclass
class ProcessTotals:
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
class JobRun:
    """A job and its coordinator's parts."""

    context: JobContext
    state: JobState
    journal: Journal
    prompts: PromptSet
    recorder: Recorder
    sessions: Sessions
    times: IterationTimes
    coordinator_epoch: int
    started_ns: int
    rewards: list[float]
    training_metrics: dict[str, float]
    last_metrics: dict[str, float]
    command_ids: "itertools.count[int]"
    totals: ProcessTotals = field(default_factory=ProcessTotals)
    scheduled: SchedulerOutput = field(default_factory=SchedulerOutput)
    """What was decided last: actions carry it out, status and metrics report it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = 0.0
    """When the first message arrived that was not decided on yet; 0: none."""
    outcome: JobOutcome | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def wake(self) -> None:
        """Something changed: decide again."""
        self.arrived = self.arrived or time.monotonic()
        self.changed.set()

    def event(self, kind: str, message: str, **attributes: str) -> None:
        """Writes down that something happened."""
        self.recorder.event(time.time_ns(), kind, message, **attributes)

    def record_span(self, name: str, start_ns: int, end_ns: int, iteration: int) -> None:
        """Draw on the timeline what the coordinator itself did."""
        self.recorder.span(
            pb.Span(worker="coordinator", name=name, start_ns=start_ns, end_ns=end_ns, iteration=iteration)
        )


def begin_run(
    context: JobContext, restored: Restored, journal: Journal, prompts: PromptSet, recorder: Recorder
) -> JobRun:
    """The parts of a job that goes on from `restored`."""
    now = time.monotonic()
    state = JobState(
        Fleet(context.spec, now),
        restored.ledger,
        fusion_state(context.spec),
        trained=restored.trained,
        checkpoint=restored.checkpoint,
        iteration_totals=restored.iteration_totals,
    )
    load_iteration_prompts(state, prompts)
    if restored.schedule.get("question") == question(context.spec, context.schedule):
        state.schedule.take(restored.schedule)
    elif candidates(context.spec):
        state.schedule.stage = "stages"
    deadline = context.spec.run_policy.active_deadline_seconds
    if deadline is not None:
        state.deadline = now + deadline - (time.time_ns() - restored.started_ns) / 1e9
    begun = now if restored.begun_ns is None else now - max(0.0, (time.time_ns() - restored.begun_ns) / 1e9)
    return JobRun(
        context=context,
        state=state,
        journal=journal,
        prompts=prompts,
        recorder=recorder,
        sessions=Sessions(),
        times=IterationTimes(begun, phase_start=now),
        coordinator_epoch=restored.coordinator_epoch,
        started_ns=restored.started_ns,
        rewards=restored.rewards,
        training_metrics=restored.training_metrics,
        last_metrics=restored.last_closed[1] if restored.last_closed else {},
        command_ids=itertools.count(restored.coordinator_epoch * COMMANDS_PER_COORDINATOR + 1),
    )


def load_iteration_prompts(state: JobState, prompts: PromptSet) -> None:
    """The state knows the prompts of the ledger's iteration."""
    state.prompt_tokens, state.prompt_lines = iteration_prompts(prompts, state.iteration, len(state.ledger.samples))


def iteration_prompts(prompts: PromptSet, iteration: int, size: int) -> tuple[list[int], list[int]]:
    """(tokens, line of the prompt file) of the prompt of every sample of an iteration."""
    batch = [prompts.of(iteration, index) for index in range(size)]
    return [len(prompt.tokens) // ITEM_BYTES for prompt in batch], [prompt.line for prompt in batch]
