"""One running job: all its mutable parts in one place, for the modules that change them.

Rule: `event_handlers` changes it by what workers say, `actions` by what was decided, background tasks by what they
found out. Everything here lives on the event loop's one thread. It decides nothing; its few methods wake the loop and
record.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.background_tasks import BackgroundTasks
from rlhf_coordinator.job.bottleneck_log import BottleneckLog
from rlhf_coordinator.job.histograms import JobHistograms
from rlhf_coordinator.job.iteration_times import IterationTimes
from rlhf_coordinator.job.process_totals import ProcessTotals
from rlhf_coordinator.job.sessions import Sessions
from rlhf_coordinator.reports.trackers.run_trackers import RunTrackers
from rlhf_coordinator.scheduling.iteration import SchedulerOutput
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import ITEM_BYTES, Origin
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.prompts import Prompt, PromptSet

log = logging.getLogger("coordinator")

MAX_WARNINGS: Final = 16
"""Warnings of the start that the status has; the log and the events have all."""


@dataclass
class JobOutcome:
    """How the job ended."""

    phase: str
    """Complete, Failed or Stopped."""
    failure: pb.Failure | None = None


@dataclass
class JobRun:
    """A job and its coordinator's parts."""

    context: JobContext
    state: JobState
    journal: Journal
    prompts: PromptSet
    trackers: RunTrackers
    sessions: Sessions
    times: IterationTimes
    coordinator_epoch: int
    """Counts the processes of the job's coordinator, this one included: fences what an earlier one asked for."""
    started_ns: int
    rewards: list[float]
    training_metrics: dict[str, float]
    last_metrics: dict[str, float]
    command_ids: "itertools.count[int]"
    advantages: Sequence[float] = ()
    """Of each sample of the iteration in progress, once it is trained; NaN: it has none. Empty: not told."""
    shaped_rewards: Sequence[float] = ()
    """The same of the rewards that the advantages were made of."""
    evaluation_prompts: Sequence[Prompt] = ()
    """Prompts that are evaluated; empty: none."""
    evaluation_records: list[Record] = field(default_factory=list)
    """What the journal had of an evaluation when this process started."""
    warnings: list[str] = field(default_factory=list)
    """Sentences on what the job may not mean, found at the start; `rlhf run` and the condition Running show them."""
    totals: ProcessTotals = field(default_factory=ProcessTotals)
    histograms: JobHistograms = field(default_factory=JobHistograms)
    scheduled: SchedulerOutput = field(default_factory=SchedulerOutput)
    """What was decided last: actions carry it out, status and metrics report it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = 0.0
    """When the first message arrived that was not decided on yet; 0: none."""
    outcome: JobOutcome | None = None
    bottlenecks: BottleneckLog = field(default_factory=BottleneckLog)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def wake(self) -> None:
        """Let the loop decide again: something changed."""
        self.arrived = self.arrived or time.monotonic()
        self.changed.set()

    def event(self, kind: str, message: str, **attributes: str) -> None:
        """Record that something happened."""
        self.trackers.event(time.time_ns(), kind, message, **attributes)

    def warn(self, kind: str, message: str) -> None:
        """Warn of something that the start found: in the log, as an event, and in the job's status."""
        log.warning("%s", message)
        self.event(kind, message)
        if message not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(message)

    def record_span(self, name: str, start_ns: int, end_ns: int, iteration: int) -> None:
        """Draw on the timeline what the coordinator itself did."""
        self.trackers.span(
            pb.Span(worker="coordinator", name=name, start_ns=start_ns, end_ns=end_ns, iteration=iteration)
        )


def load_iteration_prompts(state: JobState, prompts: PromptSet) -> None:
    """Let the state know the prompts of the ledger's iteration."""
    state.prompt_tokens, state.prompt_lines = iteration_prompts(
        prompts, [sample.origin for sample in state.ledger.samples]
    )


def iteration_prompts(prompts: PromptSet, origins: Iterable[Origin]) -> tuple[list[int], list[int]]:
    """Return of the prompt of every sample its number of tokens, and its line of the prompt file."""
    batch = [prompts.of(*origin) for origin in origins]
    return [len(prompt.tokens) // ITEM_BYTES for prompt in batch], [prompt.line for prompt in batch]
