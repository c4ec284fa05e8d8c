"""What is known of training critics beside the next decoding where the job chooses (criticOverlap Auto).

Rule: plain data. `apart` is in the journal before any rank trains by it; what was measured is in the journal's facts;
the rest is gone with the process, which then keeps its choice until it has seen an iteration whole.
`training.critic_overlap_choice` changes it.
"""

from dataclasses import dataclass, field

from rlhf_planner.critic_overlap_choice import MeasuredOverlap, OverlapChoice, SeenIteration


@dataclass
class CriticOverlapState:
    """Of one job; never used where the mode is not Auto."""

    apart: bool = False
    """The iteration in progress trains its critics apart, where it may: written down when it began."""
    faster: bool = False
    """What was last found to be faster."""
    choice: OverlapChoice | None = None
    """By which the iteration in progress began; None: by an earlier process."""
    measured: MeasuredOverlap = field(default_factory=MeasuredOverlap)
    last: SeenIteration | None = None
    beside: bool = False
    """Critics of the iteration before are trained while the one in progress is decoded."""
    trained_tokens: int = 0
    """Of the batch that was last trained on, in this process; 0: none was."""
    warm_epoch: int = 0
    """The group that trained last: what the first training of a group takes tells nothing."""
    warm: bool = False
    """The newest training was not the first one of its group."""
