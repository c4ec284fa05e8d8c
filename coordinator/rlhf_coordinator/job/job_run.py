"""One running job: its mutable parts, for the modules that change them."""

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
"""Most start warnings in the status; the log and the events contain all."""


@dataclass
class JobOutcome:
    """The outcome of the job."""

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
    """Number of coordinator processes of the job so far, this one included."""
    started_ns: int
    rewards: list[float]
    training_metrics: dict[str, float]
    last_metrics: dict[str, float]
    command_ids: "itertools.count[int]"
    advantages: Sequence[float] = ()
    """Advantage of each sample of the batch in progress once it is trained, by place in the batch; NaN where a sample
    has none. Empty if unknown."""
    shaped_rewards: Sequence[float] = ()
    """Shaped rewards from which the advantages were computed, in the same form."""
    evaluation_prompts: Sequence[Prompt] = ()
    """Prompts of the evaluation; empty without one."""
    evaluation_records: list[Record] = field(default_factory=list)
    """Records of an evaluation that the journal contained when this process started."""
    warnings: list[str] = field(default_factory=list)
    """The first MAX_WARNINGS different warnings about probable mistakes in the job, found at the start."""
    totals: ProcessTotals = field(default_factory=ProcessTotals)
    histograms: JobHistograms = field(default_factory=JobHistograms)
    scheduled: SchedulerOutput = field(default_factory=SchedulerOutput)
    """Last output of the scheduler."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = 0.0
    """Moment of the first change that was not decided on yet; 0 without one."""
    outcome: JobOutcome | None = None
    bottlenecks: BottleneckLog = field(default_factory=BottleneckLog)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def wake(self) -> None:
        """Make the loop decide again, because something changed."""
        self.arrived = self.arrived or time.monotonic()
        self.changed.set()

    def event(self, kind: str, message: str, **attributes: str) -> None:
        """Record an event of this moment in the trackers."""
        self.trackers.event(time.time_ns(), kind, message, **attributes)

    def warn(self, kind: str, message: str) -> None:
        """Warn about a finding of the start, in the log, as an event, and in `warnings` while there is room."""
        log.warning("%s", message)
        self.event(kind, message)
        if message not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(message)

    def record_span(self, name: str, start_ns: int, end_ns: int, iteration: int) -> None:
        """Draw a span of the coordinator itself on the timeline."""
        self.trackers.span(
            pb.Span(worker="coordinator", name=name, start_ns=start_ns, end_ns=end_ns, iteration=iteration)
        )


def load_iteration_prompts(state: JobState, prompts: PromptSet) -> None:
    """Put the prompt lengths and lines of the ledger's samples into the state."""
    state.prompt_tokens, state.prompt_lines = iteration_prompts(
        prompts, [sample.origin for sample in state.ledger.samples]
    )


def iteration_prompts(prompts: PromptSet, origins: Iterable[Origin]) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens, and the lines, of the samples' prompts, in the order of `origins`."""
    batch = [prompts.prompt(*origin) for origin in origins]
    return [len(prompt.tokens) // ITEM_BYTES for prompt in batch], [prompt.line for prompt in batch]
