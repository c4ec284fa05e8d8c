"""Totals of a speculator since it was built, for Prometheus.

Rule: the thread that drives the engine writes, a scrape reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from rlhf_planner.speculation.controller import MeasuredStep, Outcomes, Plan, Reason
from rlhf_planner.speculation.step_records import BUDGETS, budget_class

Ints = npt.NDArray[np.int64]

REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
"""Reasons why a step drafted, or did not."""


@dataclass
class SpeculationTotals:
    """Counts over all reported steps."""

    drafters: tuple[str, ...]
    drafted: Ints
    accepted: Ints
    """Drafted and accepted tokens, int64 [drafters, positions] each."""
    steps: int = 0
    tokens: int = 0
    """Tokens of these steps: one for each sample, and the accepted drafted ones."""
    samples: int = 0
    """Samples of these steps, added up."""
    by_budget: dict[int, int] = field(default_factory=lambda: dict.fromkeys(BUDGETS, 0))
    """Steps by class of drafted tokens per sample."""
    by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Steps by reason."""
    by_drafter_seconds: list[float] = field(default_factory=list)

    @classmethod
    def for_drafters(cls, drafters: Sequence[str], longest: int) -> "SpeculationTotals":
        """Return totals of zero."""
        shape = (len(drafters), longest)
        return cls(
            tuple(drafters),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            by_drafter_seconds=[0.0] * len(drafters),
        )

    def asked(self, drafters: Sequence[int], seconds: Sequence[float]) -> None:
        """Add the seconds that drafters took."""
        for drafter, took in zip(drafters, seconds, strict=True):
            self.by_drafter_seconds[drafter] += took

    def rested(self, rows: int) -> None:
        """Add a step without drafts and without learning."""
        self.steps += 1
        self.samples += rows
        self.tokens += rows
        self.by_budget[0] += 1
        self.by_reason["Slower"] += 1

    def stepped(self, plan: Plan, step: MeasuredStep, outcomes: Outcomes) -> None:
        """Add a step."""
        self.steps += 1
        self.samples += step.rows
        self.tokens += step.tokens
        self.by_budget[BUDGETS[budget_class(step.slots, step.rows)]] += 1
        self.by_reason[plan.reason] += 1
        place = np.arange(self.drafted.shape[1])
        np.add.at(self.drafted, outcomes.drafters, place < outcomes.drafted[:, None])
        np.add.at(self.accepted, outcomes.drafters, place < outcomes.accepted[:, None])
