"""What decisions are made from: the job's constants and everything observed of it at one moment.

Rule: decisions read this and never change it; `actions` and `event_handlers` change it and never decide.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Graph, ModelRole, Task, graph_of
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.names import Group
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import FusionState
from rlhf_coordinator.state.incremental_state import IncrementalState
from rlhf_coordinator.state.iteration_totals import IterationTotals
from rlhf_coordinator.state.ledger import Ledger
from rlhf_planner.schedule.serial import METHOD as SERIAL


@dataclass(frozen=True)
class JobContext:
    """What does not change while a job runs."""

    job: RLHFJob
    graph: Graph
    schedule: str
    """schedule.ScheduleTable as JSON."""
    awaits_workers: bool = False
    """An absent worker may have no node yet, which is for others to see: it fails nothing."""

    @property
    def spec(self) -> RLHFJobSpec:
        """The manifest."""
        return self.job.spec

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Scoring tasks."""
        return self.graph.tasks_of(Group.INFERENCE)

    @cached_property
    def calls(self) -> frozenset[str]:
        """Scoring tasks that call user code instead of running a model: they keep no device busy."""
        return frozenset(task.name for task in self.tasks if self.spec.models.source(task.model) is None)

    @cached_property
    def scored_models(self) -> tuple[ModelRole, ...]:
        """Models that inference workers hold and training changes: they need every new version."""
        return tuple(dict.fromkeys(task.model for task in self.tasks if task.model in self.graph.trained))

    def last(self, iteration: int) -> bool:
        """No iteration follows this one."""
        return iteration + 1 >= self.spec.iterations

    def folder(self, model: str) -> str:
        """Where version 0 of a model role is."""
        source = self.spec.models.source(ModelRole(model))
        assert source is not None  # what calls user code has no weights to load
        return source.path


def job_context(job: RLHFJob, schedule: str, *, awaits_workers: bool = False) -> JobContext:
    """Return the context of a resolved job."""
    return JobContext(job, graph_of(job.spec), schedule, awaits_workers)


@dataclass
class CheckpointState:
    """The newest checkpoint and the one in the making."""

    newest: int = 0
    """Version of the newest complete one; 0: none."""
    folder: str = ""
    """Of the newest complete one."""
    stage: Literal["idle", "saving", "finalizing"] = "idle"
    tries: int = 0
    """Failed in a row."""
    not_before: float = 0.0


@dataclass
class ScheduleState:
    """The choice of the schedule that training runs, and the one in force."""

    stage: Literal["stages", "searching", "tables", "decided"] = "decided"
    method: str = SERIAL
    table: str = ""
    """schedule.ScheduleTable as JSON; empty: the context's."""
    predicted: float = 0.0
    """Seconds of a mini-batch under it; 0: not known."""
    forecast: list[dict[tuple[str, str, str], tuple[float, float]]] = field(default_factory=list)
    """By rank of a block: (span name, stage, micro-batch) -> seconds from the start of a mini-batch."""
    measurement_id: int = 0
    results: dict[str, pb.MeasureResult] = field(default_factory=dict)
    """What each rank measured, by the name of its worker."""
    found: dict[str, Any] = field(default_factory=dict)
    """Method -> what the search says of its table."""
    timed: tuple[str, ...] = ()
    """Methods whose mini-batches are timed."""

    def take(self, record: dict[str, Any]) -> None:
        """Goes by a choice that was written down."""
        self.stage, self.method, self.table = "decided", record["method"], record["table"]
        self.predicted = record["predicted"].get(self.method, 0.0)
        names = [pipe["name"] for pipe in json.loads(self.table)["pipelines"]]
        self.forecast = [
            {
                (f"train/{names[pipeline]}/{kind}", str(stage), str(microbatch)): (start, end)
                for pipeline, kind, stage, microbatch, start, end in row
            }
            for row in record["steps"]
        ]


@dataclass(frozen=True)
class StopOrder:
    """Somebody asked the job to stop."""

    checkpoint: bool
    reason: str


@dataclass
class JobState:
    """Everything observed."""

    fleet: Fleet
    ledger: Ledger
    fusion: FusionState
    prompt_tokens: Sequence[int] = ()
    """Of the prompt of every sample of the iteration, by index."""
    prompt_lines: Sequence[int] = ()
    """Which line of the prompt file it is."""
    trained: bool = False
    """The journal says that the ledger's iteration was trained on."""
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    incremental: IncrementalState = field(default_factory=IncrementalState)
    iteration_totals: IterationTotals = field(default_factory=IterationTotals)
    group_epoch: int = 0
    """Highest ever seen."""
    group_failures: int = 0
    """Restarts of the training group in a row that no lost rank explains."""
    stop: StopOrder | None = None
    failure: pb.Failure | None = None
    """Something that ends the job."""
    deadline: float | None = None
    ever_ready: bool = False
    """Samples were handed out by this coordinator, or training was seen."""

    @property
    def iteration(self) -> int:
        """The one in progress."""
        return self.ledger.iteration

    @property
    def version(self) -> int:
        """Weight version the job has reached."""
        return self.iteration + self.trained
