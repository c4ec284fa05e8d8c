"""The inputs of `longRounds: Auto`, and its last choice. `fusion.long_rounds_choice` changes them.

Rule: plain data, lost with the process.
"""

from dataclasses import dataclass, field
from typing import Any

from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.long_rounds import RoundsChoice


@dataclass
class LongRoundsState:
    """The state of the choice in a job."""

    lengths: LengthModel = field(default_factory=lambda: LengthModel.prior(1))
    """Response lengths. Each of its batches is a whole period, because short rounds alone have short responses."""
    periods: int = 0
    """Periods that `lengths` learned."""
    trained: list[tuple[int, int, int]] = field(default_factory=list)
    """(prompt tokens, response tokens, line of the prompt file) of each sample of the period in progress."""
    since: int = 0
    """First iteration of `trained`."""
    learned: int = -1
    """Last iteration of `trained`."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of the last closed iterations, for their seconds of training and publishing."""
    choosing: bool = False
    """Whether a choice is being simulated."""
    considered: int | None = None
    """Iteration for which the last choice was simulated; None before the first."""
    choice: RoundsChoice | None = None
    """Choice for the next iteration that may change the schedule; None without a new one."""
    reason: str = ""
    """Reason for the schedule in force; empty before the first choice."""
