"""The state of training critics beside the next decoding, where the job chooses (criticOverlap Auto).

Rule: plain data. `apart` is in the journal before any rank trains with it, and measurements are in the journal's facts.
The rest is lost with the process; a new process uses the stored choice until it has seen a whole iteration.
`training.critic_overlap_choice` changes it.
"""

from dataclasses import dataclass, field

from rlhf_planner.critic_overlap_choice import MeasuredOverlap, OverlapChoice, SeenIteration


@dataclass
class CriticOverlapState:
    """State of one job; decisions read it in mode Auto."""

    apart: bool = False
    """Whether the iteration in progress trains its critics separately where possible; recorded when it began."""
    faster: bool = False
    """Result of the last comparison: whether separate training is faster."""
    choice: OverlapChoice | None = None
    """Choice with which the iteration in progress began; None if an earlier process made it."""
    measured: MeasuredOverlap = field(default_factory=MeasuredOverlap)
    last: SeenIteration | None = None
    beside: bool = False
    """Whether critics of the previous iteration are trained while the one in progress is decoded."""
    trained_tokens: int = 0
    """Tokens of the last batch that this process trained on; 0 without one."""
    warm_epoch: int = 0
    """Epoch of the group that trained last; the first training of a group is not representative."""
    warm: bool = False
    """Whether the newest training was not the first one of its group."""
