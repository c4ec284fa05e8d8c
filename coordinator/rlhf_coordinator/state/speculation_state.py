"""What drafts did in the job, and what was learned of them.

Rule: plain data, outside the ledger: made of what workers tell, and nothing that is decided of samples goes by it.
Event handlers add to it, `speculation.learned` writes down what is learned. What is counted of an iteration is gone
with the process; what was learned is read again.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from rlhf_planner.speculation.learned_drafts import LearnedDrafts

SWITCHES_SHOWN: Final = 5
"""Times that drafting was switched off or on, of which the status tells."""


@dataclass
class DraftTotals:
    """Steps of engines that speculate, and what became of drafts."""

    steps: int = 0
    drafted_steps: int = 0
    """That verified drafts."""
    probes: int = 0
    """That measured what was not chosen."""
    samples: int = 0
    """Of all steps, added up."""
    tokens: int = 0
    """That were drawn."""
    seconds: float = 0.0
    """Of all steps, drafting included; so are the three below."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    regret_seconds: float = 0.0
    """Beyond what the best alternative on record would have taken."""
    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(drafter, position) -> tokens that were verified."""
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same of those that were right."""

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens that a sample gets of a step, mean; 0: there was no step."""
        return self.tokens / self.samples if self.samples else 0.0

    @property
    def acceptance(self) -> float:
        """Return the share of drafted tokens that were accepted; 0: none was drafted."""
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else 0.0

    @property
    def drafted_share(self) -> float:
        """Return the share of steps that verified drafts."""
        return self.drafted_steps / self.steps if self.steps else 0.0

    def of_drafter(self, drafter: str) -> tuple[int, int]:
        """Return how many tokens of a drafter were verified, and accepted."""
        drafted = sum(count for (name, _), count in self.drafted.items() if name == drafter)
        return drafted, sum(count for (name, _), count in self.accepted.items() if name == drafter)


@dataclass
class SpeculationState:
    """Of one job."""

    learned: LearnedDrafts = field(default_factory=LearnedDrafts)
    iteration: DraftTotals = field(default_factory=DraftTotals)
    """Of the iteration in progress."""
    before: DraftTotals = field(default_factory=DraftTotals)
    """Of the one before."""
    on: bool | None = None
    """Whether steps were drafted for, as was said last; None: nothing was said."""
    said_at: float = 0.0
    """When, in seconds of the monotonic clock."""
    switches: list[str] = field(default_factory=list)
    """What was said, newest first."""

    def begin_iteration(self) -> None:
        """Count anew."""
        self.before, self.iteration = self.iteration, DraftTotals()

    def say(self, text: str, now: float, *, on: bool) -> None:
        """Note that drafting was switched, in words."""
        self.on, self.said_at = on, now
        self.switches = [text, *self.switches][:SWITCHES_SHOWN]
