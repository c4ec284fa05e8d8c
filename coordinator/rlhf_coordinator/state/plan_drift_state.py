"""The predictions of a plan for spec.devices beside its iterations, and the decision that followed from them.

Rule: plain data. The measured iterations are lost with the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_api.device_sizes import DevicePlanRecord


@dataclass
class PlanDriftState:
    """State of one job; without a watched plan, `predicted` is 0."""

    predicted: float = 0.0
    """Seconds of an iteration that the plan predicts; after a decision, those that were measured then."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage -> seconds that the plan predicts; empty after a decision."""
    measured: list[dict[str, float]] = field(default_factory=list)
    """Seconds by stage of each whole iteration since the last decision, oldest first."""
    first: bool = True
    """Whether the iteration in progress is the first one of this process, which may have seen a part of it."""
    lengths_drifted: bool = False
    """Whether response lengths have drifted since the last decision."""
    checkpoint_seconds: float = 0.0
    """Most seconds of phase Checkpointing in an iteration of this process."""
    restart_seconds: float = 0.0
    """Longest start or change of plan of this job until its workers were ready; 0 if none was measured."""
    process_seconds: float = 0.0
    """Seconds that this process had run before its phases began."""
    adopted_ns: int = 0
    """Time when the plan in force replaced another one, until the restart is measured; 0 without such a change."""
    searching: bool = False
    """Whether a search for another plan is running."""
    words: str = ""
    """The last decision in words; empty before the first."""
    pending: DevicePlanRecord | None = None
    """Plan that takes over at the next checkpoint."""
    gain_seconds: float = 0.0
    """Predicted seconds that the pending plan saves in each iteration."""
