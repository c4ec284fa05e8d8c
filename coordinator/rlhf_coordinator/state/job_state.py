"""What the scheduler decides from: the job's constants, and everything that is observed of it at one moment.

Rule: the scheduler reads this and never changes it. Actions, event handlers and what runs in the background
(`fusion`, `training`) change it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from rlhf_api.algorithms import Graph, ModelRole, Task, graph_of
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.rewards import Reward
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.state.critic_overlap_state import CriticOverlapState
from rlhf_coordinator.state.evaluation_state import EvaluationState
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import FusionState
from rlhf_coordinator.state.incremental_state import IncrementalState
from rlhf_coordinator.state.iteration_totals import IterationTotals
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sibling_state import SiblingState
from rlhf_coordinator.state.speculation_state import SpeculationState
from rlhf_planner.schedule.serial import METHOD as SERIAL

RETRIES: Final = 2
"""Of a scoring task in a job without a reward; a reward's own default."""


@dataclass(frozen=True)
class JobContext:
    """What does not change while a coordinator runs."""

    job: RLHFJob
    graph: Graph
    schedule: str
    """The serial schedule table, a `rlhf_common.schedule.ScheduleTable` as JSON."""
    awaits_workers: bool = False
    """An absent worker may have no node yet. Others see to that, so its absence never fails the job."""

    @property
    def spec(self) -> RLHFJobSpec:
        """The spec of the manifest."""
        return self.job.spec

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The scoring tasks of the graph."""
        return self.graph.tasks_of(Group.INFERENCE)

    @cached_property
    def calls(self) -> frozenset[str]:
        """Names of the scoring tasks that call user code instead of running a model: they keep no device busy."""
        return frozenset(task.name for task in self.tasks if task.rewards and self._reward(task).own_model is None)

    def _reward(self, task: Task) -> Reward:
        return self.spec.models.reward_of(task).reward

    def retries(self, task: Task) -> int:
        """Return how often a task that failed on a sample is tried again: its reward's number, or the highest of any
        reward for what is none."""
        given = [self.spec.models.reward_of(task)] if task.rewards else self.spec.models.all_rewards
        return max((each.reward.retries for each in given), default=RETRIES)

    def abstains(self, task: Task) -> bool:
        """Return whether a task that failed for the last time on a sample abstains, and the job goes on."""
        return task.rewards and self._reward(task).on_failure == "Abstain"

    @cached_property
    def scored_models(self) -> tuple[ModelRole, ...]:
        """Models that inference workers hold and training changes: they need every new version."""
        return tuple(dict.fromkeys(task.model for task in self.tasks if task.model in self.graph.trained))

    @cached_property
    def draft_model(self) -> str:
        """Folder from which a draft model starts that is trained with the policy; empty: none is."""
        draft = self.spec.generation.speculation.draft_model
        return draft.path if draft is not None and draft.train == "Enabled" else ""

    def last(self, iteration: int) -> bool:
        """Return whether no iteration follows this one."""
        return iteration + 1 >= self.spec.iterations

    def ends_whole(self, iteration: int) -> bool:
        """Return whether all of an iteration must be trained before anything goes on: a checkpoint or an evaluation is
        due after it, or none follows it. It depends on the job alone."""
        spec, version = self.spec, iteration + 1
        checkpoint = spec.checkpoints is not None and spec.checkpoints.due(version)
        evaluation = spec.evaluation is not None and spec.evaluation.due(version, spec.iterations)
        return checkpoint or evaluation or self.last(iteration)

    def folder(self, model: str) -> str:
        """Return the folder of version 0 of a model role."""
        source = self.spec.models.source(ModelRole(model))
        assert source is not None  # what calls user code has no weights to load
        return source.path


def job_context(job: RLHFJob, schedule: str, *, awaits_workers: bool = False) -> JobContext:
    """Return the context of a resolved job."""
    return JobContext(job, graph_of(job.spec), schedule, awaits_workers)


@dataclass
class CheckpointState:
    """The newest checkpoint, and the one that is being written."""

    newest: int = 0
    """Version of the newest complete checkpoint; 0: there is none."""
    folder: str = ""
    """Folder of the newest complete checkpoint."""
    best: str = ""
    """Folder of the checkpoint with the best evaluation; empty: none has one."""
    made_ns: int = 0
    """When that was complete, in nanoseconds since the Unix epoch; 0: not known."""
    stage: Literal["idle", "saving", "finalizing"] = "idle"
    tries: int = 0
    """How many failed in a row."""
    not_before: float = 0.0
    """Seconds of the monotonic clock before which none is begun."""


@dataclass
class ScheduleState:
    """The schedule that training runs, and how far the choice of a better one is."""

    stage: Literal["stages", "searching", "tables", "decided"] = "decided"
    method: str = SERIAL
    table: str = ""
    """The table in force, as JSON; empty: the serial one of the context."""
    predicted: float = 0.0
    """Seconds that a mini-batch is expected to take under it; 0: not known."""
    forecast: list[dict[tuple[str, str, str], tuple[float, float]]] = field(default_factory=list)
    """Per row of the table: (span name, stage, micro-batch) -> (start, end), in seconds from the start of
    a mini-batch."""
    measurement_id: int = 0
    results: dict[str, pb.MeasureResult] = field(default_factory=dict)
    """What each rank measured, by the name of its worker."""
    candidates: dict[str, Any] = field(default_factory=dict)
    """Method -> the table that the search found for it, and what it predicts of that."""
    timed: tuple[str, ...] = ()
    """Methods whose mini-batches are timed."""

    def take(self, record: dict[str, Any]) -> None:
        """Go by a choice that was written down."""
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
    """What is known of an iteration that was closed before its batch, or its critics, were trained."""

    iteration: int
    metrics: dict[str, float]
    """All but those of training."""


@dataclass(frozen=True)
class StopOrder:
    """Somebody asked the job to stop."""

    checkpoint: bool
    reason: str


@dataclass
class JobState:
    """Everything that is observed of a job at one moment. Times are seconds of one monotonic clock."""

    fleet: Fleet
    ledger: Ledger
    fusion: FusionState
    prompt_tokens: Sequence[int] = ()
    """Tokens of the prompt of each sample of the iteration, by index."""
    prompt_lines: Sequence[int] = ()
    """Line of the prompt file of each sample, by index."""
    trained: bool = False
    """The journal says that the ledger's iteration was trained on."""
    critic_update_pending: bool = False
    """Of that training only the policy's part, which is published first, is done."""
    overlaps_training: bool = False
    """The ledger's iteration is closed before its batch is trained on, which the next one decodes beside."""
    open_report: OpenReport | None = None
    """Of the iteration before."""
    critic_overlap: CriticOverlapState = field(default_factory=CriticOverlapState)
    groups_dropped: int = 0
    """Groups that were dropped in this iteration and counted."""
    refill_told: bool = False
    """What became of this iteration's dropped groups was said."""
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    incremental: IncrementalState = field(default_factory=IncrementalState)
    siblings: SiblingState = field(default_factory=SiblingState)
    speculation: SpeculationState = field(default_factory=SpeculationState)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    iteration_totals: IterationTotals = field(default_factory=IterationTotals)
    group_epoch: int = 0
    """The highest epoch of a training group that was ever seen: each group that forms has a higher one."""
    group_failures: int = 0
    """How many times in a row the training group restarted without a lost rank to explain it."""
    stop: StopOrder | None = None
    failure: pb.Failure | None = None
    """What ends the job, if anything does."""
    deadline: float | None = None
    """When the job fails for taking too long; None: never."""
    ever_ready: bool = False
    """This coordinator has leased samples, or seen training: the job is not starting any more."""

    @property
    def iteration(self) -> int:
        """The iteration in progress."""
        return self.ledger.iteration

    @property
    def version(self) -> int:
        """The weight version that the job has reached: that of every batch that is complete and closed, or trained."""
        return self.iteration + self.trained

    @property
    def batch_handed_on(self) -> bool:
        """Whether the batch is complete, and nothing more is drawn or scored by the iteration's weights before it is
        closed."""
        return self.overlaps_training and self.ledger.all_scored

    @property
    def workers_version(self) -> int:
        """The weight version by which workers decode and score now, or that they load for the next iteration."""
        return self.version if self.trained or self.batch_handed_on else self.ledger.version

    @property
    def may_be_saved(self) -> bool:
        """Whether a checkpoint of the job's version would be all that the iteration in progress needs: not where it
        decodes by weights of the version before, which are in no file then."""
        return self.trained or self.ledger.version == self.iteration
