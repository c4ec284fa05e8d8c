"""The inputs of inter-stage fusion in an iteration, and its effects: costs, lengths, the choice, counts.

Rule: plain data.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_planner.inter_stage.balance import Reallocation
from rlhf_planner.inter_stage.choose import FusionChoice
from rlhf_planner.inter_stage.costs import StageCosts, score_batch_of
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.learned_costs import ObservedWork
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.throughput import ThroughputCurve, WorkerPace
from rlhf_planner.speculation.observed_gain import DraftedSteps

LINK_BYTES_PER_SECOND: Final = 4e8
"""Assumed bytes per second between two workers, before migrations are observed."""
NOMINAL: Final = (StepTime(1, 256, 0.02),)
"""Nominal step for unmeasured costs."""


NO_FUSION: Final = FusionChoice(0, 0, "Auto", 0.0, 0.0, (), "")
"""The choice without consolidation and predictions."""


@dataclass
class MigrationCounts:
    """Samples that moved between workers in an iteration, and the cost of the moves."""

    kv: int = 0
    """Samples that moved with their KV cache."""
    tokens: int = 0
    """Samples that moved only with their tokens."""
    stayed: int = 0
    """Samples that were to move with their KV cache and stayed."""
    bytes: int = 0
    seconds: float = 0.0
    """Seconds from the first part of a cache to the answer, summed over samples."""
    paused: float = 0.0
    """Seconds of these in which no worker decoded the sample."""
    longest_pause: float = 0.0
    """Longest of these pauses of one sample, in seconds."""


class ExecutedReallocation(NamedTuple):
    """Samples that were asked to move together, and the data for measuring the effect later."""

    moment: float
    """Moment of the request, in seconds of the monotonic clock."""
    time_ns: int
    """The same in nanoseconds since the Unix epoch."""
    reallocation: Reallocation
    samples: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    """Samples that source and destination decoded: pairs of a sample and its number of known tokens."""
    curves: tuple[ThroughputCurve, ThroughputCurve]
    """Throughput curves of both workers, as known at that moment."""


class WorkInterval(NamedTuple):
    """The interval in which a worker did one kind of work, in nanoseconds since the Unix epoch."""

    worker: str
    start_ns: int
    end_ns: int


@dataclass
class FusionState:
    """The state of fusion in a job."""

    costs: StageCosts
    lengths: LengthModel
    window: list[tuple[int, int, int]] = field(default_factory=list)
    """(prompt tokens, response tokens, line) of the samples of a sorted window in progress, not in `lengths` yet."""
    measured: bool = False
    """Whether workers measured the costs, in this or an earlier process; otherwise they are nominal."""
    given_up: str = ""
    """Reason why nothing is fused until this process ends; empty without one."""
    measurement_id: int = 0
    results: dict[tuple[str, str], pb.MeasureResult] = field(default_factory=dict)
    """(worker, role) -> its measurement."""
    planning: tuple[int, IterationSetup] | None = None
    """Last iteration for which the simulation of a choice was started, with its setup; it may be the next one."""
    choice: FusionChoice = NO_FUSION
    moved: MigrationCounts = field(default_factory=MigrationCounts)
    moved_at: dict[str, float] = field(default_factory=dict)
    """Worker -> moment of the last decision Migrate from or to it, or Withdraw from it, in seconds of the monotonic
    clock."""
    next_balance: float = 0.0
    """Moment of the monotonic clock before which nothing is balanced."""
    busy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Worker -> decode or score -> seconds, from its observations."""
    observed: list[ObservedWork] = field(default_factory=list)
    """Observed costs of work other than decoding."""
    decoded: list[tuple[WorkInterval, ObservedWork]] = field(default_factory=list)
    """Intervals and costs of plain decode steps."""
    stretches: list[tuple[WorkInterval, DraftedSteps]] = field(default_factory=list)
    """Intervals of plain and drafted decode steps, with the tokens that they drew."""
    paces: dict[str, WorkerPace] = field(default_factory=dict)
    """Worker -> its learned pace."""
    reallocated: list[ExecutedReallocation] = field(default_factory=list)
    """Moves of samples that balance the workers."""
    destinations: dict[int, str] = field(default_factory=dict)
    """Sample -> destination of its last balancing move."""
    scored: list[WorkInterval] = field(default_factory=list)
    """Intervals in which generation workers scored."""
    learned: dict[str, float] | None = None
    """Metrics of what was learned from the iteration; None before that."""
    planned: FusionChoice | None = None
    """Choice made ahead for the iteration in `planning`; None without one."""

    def begin_iteration(self) -> None:
        """Reset the state of an iteration: its choice, its moves and its observations."""
        self.choice, self.moved = NO_FUSION, MigrationCounts()
        self.moved_at, self.busy, self.learned, self.planned = {}, {}, None, None
        self.observed, self.decoded, self.scored = [], [], []
        self.stretches, self.reallocated, self.destinations = [], [], {}


def fusion_state(spec: RLHFJobSpec) -> FusionState:
    """Return the initial state of a job."""
    return FusionState(nominal_costs(spec), LengthModel.prior(spec.rollout.max_response_tokens))


def nominal_costs(spec: RLHFJobSpec) -> StageCosts:
    """Return costs under which moving a KV cache is cheaper than rebuilding it."""
    return StageCosts.measured(
        decode=NOMINAL,
        prefill=NOMINAL,
        max_batch_size=spec.generation.max_batch_size,
        score_batch=score_batch_of(spec),
        kv_bytes_per_token=1.0,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=spec.replays_tokens,
    )
