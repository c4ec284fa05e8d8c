"""The counts of drafts in the job, and what was learned from them.

Rule: plain data, outside the ledger. The counts of an iteration are lost with the process.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from rlhf_planner.speculation.learned_drafts import LearnedDrafts

SWITCHES_SHOWN: Final = 5
"""Most stored descriptions of switches."""


@dataclass
class DraftTotals:
    """Steps of speculating engines, and the results of drafts."""

    steps: int = 0
    drafted_steps: int = 0
    """Steps that verified drafts."""
    probes: int = 0
    """Steps that measured an alternative to the current choice."""
    samples: int = 0
    """Samples in steps, summed over all steps."""
    tokens: int = 0
    """Tokens that the steps drew."""
    seconds: float = 0.0
    """Seconds of all steps, including drafting; the next two are parts of it."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    regret_seconds: float = 0.0
    """Seconds beyond the estimated time of the best alternative."""
    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(drafter, position) -> verified tokens."""
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(drafter, position) -> accepted tokens."""

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens per sample and step; 0 without a step."""
        return self.tokens / self.samples if self.samples else 0.0

    @property
    def acceptance(self) -> float:
        """Return the share of drafted tokens that were accepted; 0 without drafts."""
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else 0.0

    @property
    def drafted_share(self) -> float:
        """Return the share of steps that verified drafts; 0 without a step."""
        return self.drafted_steps / self.steps if self.steps else 0.0

    def of_drafter(self, drafter: str) -> tuple[int, int]:
        """Return the numbers of verified and accepted tokens of a drafter."""
        drafted = sum(count for (name, _), count in self.drafted.items() if name == drafter)
        return drafted, sum(count for (name, _), count in self.accepted.items() if name == drafter)


@dataclass
class SpeculationState:
    """State of speculation in one job."""

    learned: LearnedDrafts = field(default_factory=LearnedDrafts)
    iteration: DraftTotals = field(default_factory=DraftTotals)
    """Counts of the iteration in progress."""
    before: DraftTotals = field(default_factory=DraftTotals)
    """Counts of the previous iteration."""
    on: bool | None = None
    """Whether drafting was on when that was last recorded; None before."""
    said_at: float = 0.0
    """Moment of that record, in seconds of the monotonic clock."""
    switches: list[str] = field(default_factory=list)
    """Descriptions of the last switches, newest first."""

    def begin_iteration(self) -> None:
        """Begin new counts; the present ones become those of the previous iteration."""
        self.before, self.iteration = self.iteration, DraftTotals()

    def say(self, text: str, now: float, *, on: bool) -> None:
        """Record a reported switch of drafting."""
        self.on, self.said_at = on, now
        self.switches = [text, *self.switches][:SWITCHES_SHOWN]
