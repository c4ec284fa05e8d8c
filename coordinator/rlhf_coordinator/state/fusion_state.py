"""What inter-stage fusion goes by in an iteration, and what it has done: costs, lengths, the choice, counts.

Rule: plain data. The scheduler reads it (`consolidation`, `balancing`); the modules of `fusion` change it. The costs
belong to the job and are written down; the length model is rebuilt from what the journal keeps; the rest begins anew
with every iteration.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_planner.inter_stage.balance import Reallocation
from rlhf_planner.inter_stage.choose import FusionChoice
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.learned_costs import ObservedWork
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.throughput import ThroughputCurve, WorkerPace
from rlhf_planner.speculation.observed_gain import DraftedSteps

LINK_BYTES_PER_SECOND: Final = 4e8
"""Bytes per second between two workers until a migration was observed: gRPC over one connection, serialization
included."""
NOMINAL: Final = (StepTime(1, 256, 0.02),)
"""A step where nothing was measured (mode Fixed): only its order of magnitude against a transfer counts."""


NO_FUSION: Final = FusionChoice(0, 0, "Auto", 0.0, 0.0, (), "")
"""Nothing consolidates, nothing is predicted."""


@dataclass
class MigrationCounts:
    """How many samples moved between workers in an iteration, and what it took."""

    kv: int = 0
    """Samples that moved with their KV cache."""
    tokens: int = 0
    """Samples that moved by their tokens alone."""
    stayed: int = 0
    """Samples that could not be moved with their KV cache."""
    bytes: int = 0
    seconds: float = 0.0
    """From the first part of a cache to the answer, summed over samples."""
    paused: float = 0.0
    """Seconds of these in which neither worker decoded the sample."""
    longest_pause: float = 0.0
    """The longest of these pauses, of one sample."""


class MadeReallocation(NamedTuple):
    """Samples that were asked to move together, and what is needed to say later what that gave."""

    moment: float
    """When, in seconds of the monotonic clock."""
    time_ns: int
    """The same in nanoseconds since the Unix epoch."""
    reallocation: Reallocation
    held: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    """What its source and its destination held: pairs of a sample and the tokens that were known of it."""
    curves: tuple[ThroughputCurve, ThroughputCurve]
    """Of both workers, as they were known then."""


class WorkInterval(NamedTuple):
    """From when to when a worker did one thing, in nanoseconds since the Unix epoch."""

    worker: str
    start_ns: int
    end_ns: int


@dataclass
class FusionState:
    """The state of fusion in a job. From `choice` on it is that of the iteration in progress."""

    costs: StageCosts
    lengths: LengthModel
    measured: bool = False
    """The costs were measured by the workers; otherwise they are nominal."""
    given_up: str = ""
    """Why this job fuses nothing any more; empty: it may fuse."""
    measurement_id: int = 0
    results: dict[tuple[str, str], pb.MeasureResult] = field(default_factory=dict)
    """(worker, role) -> what it measured."""
    planning: tuple[int, IterationSetup] | None = None
    """The iteration, and its setup, that a choice was last simulated for; it may be the next one."""
    choice: FusionChoice = NO_FUSION
    moved: MigrationCounts = field(default_factory=MigrationCounts)
    moved_at: dict[str, float] = field(default_factory=dict)
    """Worker -> when samples were last asked to leave it or to come to it, in seconds of the monotonic clock."""
    next_balance: float = 0.0
    """Before this time nothing is balanced: to look for an imbalance costs time too."""
    busy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Worker -> decode or score -> seconds, by its spans."""
    observed: list[ObservedWork] = field(default_factory=list)
    """What work other than decoding took."""
    decoded: list[tuple[WorkInterval, ObservedWork]] = field(default_factory=list)
    """What plain decode steps took, and when that was."""
    stretches: list[tuple[WorkInterval, DraftedSteps]] = field(default_factory=list)
    """All decode steps with the tokens they drew, and when that was."""
    paces: dict[str, WorkerPace] = field(default_factory=dict)
    """Worker -> how fast it is beside the others; learned again within seconds by a coordinator that takes over."""
    reallocated: list[MadeReallocation] = field(default_factory=list)
    """Samples that moved to balance the workers."""
    destinations: dict[int, str] = field(default_factory=dict)
    """Sample -> worker that it was last to go to, to balance the workers."""
    scored: list[WorkInterval] = field(default_factory=list)
    """When generation workers scored."""
    learned: dict[str, float] | None = None
    """Metrics of what was learned from the iteration; None: nothing yet."""
    planned: FusionChoice | None = None
    """The choice that was made ahead for what `planning` names."""

    def begin_iteration(self) -> None:
        """Forget what belongs to an iteration: nothing is chosen, nothing was moved."""
        self.choice, self.moved = NO_FUSION, MigrationCounts()
        self.moved_at, self.busy, self.learned, self.planned = {}, {}, None, None
        self.observed, self.decoded, self.scored = [], [], []
        self.stretches, self.reallocated, self.destinations = [], [], {}


def fusion_state(spec: RLHFJobSpec) -> FusionState:
    """Return the state of a job in which nothing was measured or learned yet."""
    return FusionState(nominal_costs(spec), LengthModel.prior(spec.rollout.max_response_tokens))


def nominal_costs(spec: RLHFJobSpec) -> StageCosts:
    """Return costs under which moving a KV cache is cheaper than building it again."""
    return StageCosts.measured(
        decode=NOMINAL,
        prefill=NOMINAL,
        max_batch_size=spec.generation.max_batch_size,
        kv_bytes_per_token=1.0,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=spec.deterministic,
    )
