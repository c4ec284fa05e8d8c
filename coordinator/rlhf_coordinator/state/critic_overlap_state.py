"""The state of training critics beside the next decoding, where the job chooses (criticOverlap Auto).

Rule: plain data.
"""

from dataclasses import dataclass, field

from rlhf_planner.critic_overlap_choice import MeasuredOverlap, OverlapChoice, SeenIteration


@dataclass
class CriticOverlapState:
    """State of one job; it is used in mode Auto."""

    apart: bool = False
    """Whether the iteration in progress trains its critics separately where possible."""
    faster: bool = False
    """Result of the last comparison: whether separate training is faster."""
    choice: OverlapChoice | None = None
    """Choice with which the iteration in progress began; None if nothing was chosen, or an earlier process chose."""
    measured: MeasuredOverlap = field(default_factory=MeasuredOverlap)
    last: SeenIteration | None = None
    beside: bool = False
    """Whether the report of the previous iteration was open when the one in progress began, or when this process
    continued it."""
    trained_tokens: int = 0
    """Prompt and response tokens of the last batch whose training this process recorded; 0 without one."""
    warm_epoch: int = 0
    """Epoch of the group that trained last."""
    warm: bool = False
    """Whether the newest training was not the first one of its group that this process recorded."""
