"""What inter-stage fusion goes by in an iteration, and what it has done: costs, lengths, the choice, counts.

Rule: plain data. `release` and `tail` read it and decide, `fusing`, `learning` and `moving` change it. The costs are a
job's and are written down; the length model is rebuilt from what the journal keeps; the rest begins anew with every
iteration.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_api import control_pb2 as pb
from rlhf_api.job import RLHFJobSpec
from rlhf_planner.inter_stage.choose import FusionChoice
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.learned_costs import ObservedWork
from rlhf_planner.inter_stage.lengths import LengthModel

LINK_BYTES_PER_SECOND: Final = 4e8
"""Between two workers until a migration was observed: gRPC over one connection, serialization included."""
NOMINAL: Final = (StepTime(1, 256, 0.02),)
"""A step where nothing was measured (mode Fixed): only its order of magnitude against a transfer counts."""


NO_FUSION: Final = FusionChoice(0, 0, "Auto", 0.0, 0.0, (), "")
"""Nothing is gathered, nothing is predicted."""


@dataclass
class MigrationCounts:
    """How many samples moved between workers in an iteration, and what it took."""

    kv: int = 0
    """Samples with their KV cache."""
    tokens: int = 0
    """Samples by their tokens alone."""
    stayed: int = 0
    """Samples that could not be moved with their KV cache."""
    bytes: int = 0
    seconds: float = 0.0
    """From first part to answer, summed over samples."""
    paused: float = 0.0
    """Of them neither worker decoded the sample."""
    longest_pause: float = 0.0
    """Of one sample."""


class WorkInterval(NamedTuple):
    """From when to when a worker did one thing, in nanoseconds since the Unix epoch."""

    worker: str
    start_ns: int
    end_ns: int


@dataclass
class FusionState:
    """Of one job; from `choice` on of the iteration in progress."""

    costs: StageCosts
    lengths: LengthModel
    measured: bool = False
    """The costs are the workers' own; else nominal."""
    given_up: str = ""
    """Why this job fuses nothing any more; empty: it may."""
    measurement_id: int = 0
    results: dict[tuple[str, str], pb.MeasureResult] = field(default_factory=dict)
    """(worker, role) -> what it measured."""
    planning: tuple[int, IterationSetup] | None = None
    """Iteration and layout that were last begun to be planned; across iterations."""
    choice: FusionChoice = NO_FUSION
    moved: MigrationCounts = field(default_factory=MigrationCounts)
    moved_at: dict[str, float] = field(default_factory=dict)
    """Worker -> when samples were last asked to leave it or to come to it."""
    next_balance: float = 0.0
    """Before this time nothing is balanced: to look for an imbalance costs time too."""
    busy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Worker -> decode or score -> seconds, by its spans."""
    observed: list[ObservedWork] = field(default_factory=list)
    """What work took, but decoding."""
    decoded: list[tuple[WorkInterval, ObservedWork]] = field(default_factory=list)
    """What decoding took, and when that was."""
    scored: list[WorkInterval] = field(default_factory=list)
    """When generation workers scored."""
    learned: dict[str, float] | None = None
    """Metrics of what was learned from the iteration; None: nothing yet."""
    planned: FusionChoice | None = None
    """Made ahead, for what `planning` says."""

    def begin_iteration(self) -> None:
        """Nothing is chosen, nothing was moved."""
        self.choice, self.moved = NO_FUSION, MigrationCounts()
        self.moved_at, self.busy, self.learned, self.planned = {}, {}, None, None
        self.observed, self.decoded, self.scored = [], [], []


def fusion_state(spec: RLHFJobSpec) -> FusionState:
    """Before anything is measured or learned."""
    return FusionState(nominal_costs(spec), LengthModel.prior(spec.rollout.max_response_tokens))


def nominal_costs(spec: RLHFJobSpec) -> StageCosts:
    """Costs by which a KV cache is moved rather than built anew."""
    return StageCosts.measured(
        decode=NOMINAL,
        prefill=NOMINAL,
        max_batch_size=spec.generation.max_batch_size,
        kv_bytes_per_token=1.0,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=spec.deterministic,
    )
