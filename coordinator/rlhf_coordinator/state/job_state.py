"""The input of the scheduler: the job's constants, and its observed state at one moment.

Rule: the scheduler reads this and does not change it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from rlhf_api.algorithms import Graph, ModelRole, Task, graph_of
from rlhf_api.device_sizes import DevicePlanRecord
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.rewards import Reward
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.state.ahead_state import AheadState
from rlhf_coordinator.state.critic_overlap_state import CriticOverlapState
from rlhf_coordinator.state.evaluation_state import EvaluationState
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import FusionState
from rlhf_coordinator.state.incremental_state import IncrementalState
from rlhf_coordinator.state.iteration_totals import IterationTotals
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.long_rounds_state import LongRoundsState
from rlhf_coordinator.state.plan_drift_state import PlanDriftState
from rlhf_coordinator.state.sibling_state import SiblingState
from rlhf_coordinator.state.speculation_state import SpeculationState
from rlhf_coordinator.state.streamed_work import StreamedWork
from rlhf_planner.plan_search.cost_document import CostDocument
from rlhf_planner.schedule.serial import METHOD as SERIAL

RETRIES: Final = 2
"""Retries of a scoring task in a job without a reward; the default of a reward."""


@dataclass(frozen=True)
class JobContext:
    """Constants of a coordinator process."""

    job: RLHFJob
    graph: Graph
    schedule: str
    """The serial schedule table, a `rlhf_common.schedule.ScheduleTable` as JSON."""
    device_plan: DevicePlanRecord | None = None
    """The plan for spec.devices; None without one."""
    awaits_workers: bool = False
    """Whether an absent worker may still wait for a node. Its absence then does not fail the job."""

    @property
    def spec(self) -> RLHFJobSpec:
        """The spec of the resolved job."""
        return self.job.spec

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The scoring tasks of the graph."""
        return self.graph.tasks_of(Group.INFERENCE)

    @cached_property
    def calls(self) -> frozenset[str]:
        """Names of the scoring tasks of rewards that have no model of their own."""
        return frozenset(task.name for task in self.tasks if task.rewards and self._reward(task).own_model is None)

    def _reward(self, task: Task) -> Reward:
        return self.spec.models.reward_of(task).reward

    def retries(self, task: Task) -> int:
        """Return how often a task that failed on a sample is retried.

        This is its reward's number, or, for a task that is no reward, the highest number of any reward.
        """
        rewards = [self.spec.models.reward_of(task)] if task.rewards else self.spec.models.all_rewards
        return max((each.reward.retries for each in rewards), default=RETRIES)

    def abstains(self, task: Task) -> bool:
        """Return whether a task abstains after its last failure on a sample, so that the job continues."""
        return task.rewards and self._reward(task).on_failure == "Abstain"

    @cached_property
    def scored_models(self) -> tuple[ModelRole, ...]:
        """Models of scoring tasks that training changes."""
        return tuple(dict.fromkeys(task.model for task in self.tasks if task.model in self.graph.trained))

    @cached_property
    def draft_model(self) -> str:
        """Path of the initial draft model that is trained with the policy; empty without one."""
        draft = self.spec.generation.speculation.draft_model
        return draft.path if draft is not None and draft.train == "Enabled" else ""

    def last(self, iteration: int) -> bool:
        """Return whether no iteration follows this one."""
        return iteration + 1 >= self.spec.iterations

    def ends_whole(self, iteration: int) -> bool:
        """Return whether an iteration must be trained completely before the next one starts."""
        spec, version = self.spec, iteration + 1
        checkpoint = spec.checkpoints is not None and spec.checkpoints.due(version)
        evaluation = spec.evaluation is not None and spec.evaluation.due(version, spec.iterations)
        return checkpoint or evaluation or self.last(iteration)

    def folder(self, model: str) -> str:
        """Return the path, or hub id, of version 0 of a model role."""
        source = self.spec.models.source(ModelRole(model))
        assert source is not None  # tasks that call user code have no weights to load
        return source.path


def job_context(
    job: RLHFJob, schedule: str, *, device_plan: DevicePlanRecord | None = None, awaits_workers: bool = False
) -> JobContext:
    """Return the context of a resolved job whose sizes are set."""
    return JobContext(job, graph_of(job.spec), schedule, device_plan, awaits_workers)


@dataclass
class CheckpointState:
    """The newest checkpoint, and the one being saved."""

    newest: int = 0
    """Version of the newest complete checkpoint; 0 without one."""
    folder: str = ""
    """Folder of the newest complete checkpoint."""
    best: str = ""
    """Folder of the checkpoint with the best evaluation; empty without one."""
    made_ns: int = 0
    """Time of the newest checkpoint, in nanoseconds since the Unix epoch; 0 if unknown."""
    stage: Literal["idle", "saving", "finalizing"] = "idle"
    tries: int = 0
    """Number of consecutive failed attempts."""
    not_before: float = 0.0
    """Moment of the monotonic clock before which no attempt begins."""


@dataclass
class ScheduleState:
    """The schedule in training, and the progress of choosing a better one."""

    stage: Literal["stages", "searching", "tables", "decided"] = "decided"
    method: str = SERIAL
    table: str = ""
    """Chosen table as JSON; empty without a choice: then the serial one of the context is in force."""
    predicted: float = 0.0
    """Predicted seconds of a mini-batch under the chosen table; 0 if unknown."""
    forecast: list[dict[tuple[str, str, str], tuple[float, float]]] = field(default_factory=list)
    """For each row of the table: (span name, stage, micro-batch) -> (start, end), in seconds from the start of a
    mini-batch."""
    measurement_id: int = 0
    results: dict[str, pb.MeasureResult] = field(default_factory=dict)
    """Answers to the measurement in progress, by the name of the rank's worker."""
    candidates: dict[str, Any] = field(default_factory=dict)
    """Method -> the table that the search found, with its predictions."""
    timed: tuple[str, ...] = ()
    """Methods whose mini-batches are timed."""

    def take(self, record: dict[str, Any]) -> None:
        """Apply a stored choice."""
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
class OpenReport:
    """The report of an iteration that was closed before its batch, or its critics, were trained."""

    iteration: int
    metrics: dict[str, float]
    """All metrics but those of training."""


@dataclass(frozen=True)
class StopOrder:
    """A request to stop the job."""

    checkpoint: bool
    reason: str


@dataclass
class JobState:
    """The observed state of a job at one moment."""

    fleet: Fleet
    ledger: Ledger
    fusion: FusionState
    prompt_tokens: Sequence[int] = ()
    """Number of prompt tokens of each sample of the iteration, by index."""
    prompt_lines: Sequence[int] = ()
    """Line of the prompt of each sample, by index (`Prompt.line`)."""
    expected_lengths: Mapping[int, int] = field(default_factory=dict)
    """Expected response tokens by line of the prompt file when the iteration began; empty without sorted windows."""
    trained: bool = False
    """Whether the journal says that the ledger's iteration was trained."""
    critic_update_pending: bool = False
    """Whether critics were still to be trained when `trained` became true."""
    overlaps_training: bool = False
    """Whether the ledger's iteration is closed before its batch is trained."""
    open_report: OpenReport | None = None
    """Report of the previous iteration while its training, or that of its critics, is open; otherwise None."""
    critic_overlap: CriticOverlapState = field(default_factory=CriticOverlapState)
    streamed_work: StreamedWork = field(default_factory=StreamedWork)
    long_rounds: LongRoundsState = field(default_factory=LongRoundsState)
    groups_dropped: int = 0
    """Groups of this iteration that were dropped and counted."""
    refill_told: bool = False
    """Whether the fate of this iteration's dropped groups was reported."""
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    incremental: IncrementalState = field(default_factory=IncrementalState)
    siblings: SiblingState = field(default_factory=SiblingState)
    speculation: SpeculationState = field(default_factory=SpeculationState)
    ahead: AheadState = field(default_factory=AheadState)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    iteration_totals: IterationTotals = field(default_factory=IterationTotals)
    plan_drift: PlanDriftState = field(default_factory=PlanDriftState)
    group_epoch: int = 0
    """Highest epoch of a training group so far: each new group has a higher one."""
    group_failures: int = 0
    """Number of counted restarts of the training group since the last CommitTrained of this process."""
    rank_costs: dict[int, CostDocument] = field(default_factory=dict)
    """Measured costs by rank, emptied when all ranks have reported."""
    stop: StopOrder | None = None
    failure: pb.Failure | None = None
    """Failure that ends the job, if any."""
    deadline: float | None = None
    """Moment when the job fails because it took too long; None for never."""
    ever_ready: bool = False
    """Whether this coordinator has leased samples of a batch for decoding, or sent a Train."""

    @property
    def iteration(self) -> int:
        """The iteration in progress."""
        return self.ledger.iteration

    @property
    def version(self) -> int:
        """The weight version of the job: the iteration in progress, plus 1 once it is trained."""
        return self.iteration + self.trained

    @property
    def batch_handed_on(self) -> bool:
        """Whether the batch is complete, in an iteration that is closed before its batch is trained."""
        return self.overlaps_training and self.ledger.all_scored

    @property
    def workers_version(self) -> int:
        """The weight version of policy and critics that workers need now, or for the next iteration."""
        return self.version if self.trained or self.batch_handed_on else self.ledger.version

    @property
    def may_be_saved(self) -> bool:
        """Whether the iteration in progress is trained, or decodes with the weights of its own version."""
        return self.trained or self.ledger.version == self.iteration
