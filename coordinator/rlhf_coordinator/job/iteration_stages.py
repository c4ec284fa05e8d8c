"""The time of an iteration, divided into stages.

Rule: pure. Each phase belongs to one stage; the rest of the time is `other`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from rlhf_common.metrics.labels import STAGES

STAGE_OF_PHASE: Final = {
    "Starting": "wait",
    "Generating": "generation",
    "Scoring": "inference",
    "Training": "training",
    "Publishing": "weight_update",
    "Checkpointing": "checkpoint",
    "Recovering": "wait",
}


def stage_seconds(phases: Mapping[str, float], total: float | None = None) -> dict[str, float]:
    """Return the seconds of every stage. `phases`: seconds by phase; `total`: seconds up to which `other` fills the
    sum, by default none."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for phase, spent in phases.items():
        seconds[STAGE_OF_PHASE.get(phase, "other")] += spent
    if total is not None:
        seconds["other"] += max(0.0, total - sum(seconds.values()))
    return seconds


@dataclass(frozen=True)
class PhaseTotals:
    """Seconds by phase since this process started, as of one moment."""

    phase: str = "Starting"
    since: float = 0.0
    """Moment when the current phase was entered, in seconds of the monotonic clock."""
    since_ns: int = 0
    """The same moment, in nanoseconds since the Unix epoch."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase before that moment."""
    recoveries: int = 0
    """Number of times that the phase Recovering was entered."""

    def entered(self, phase: str, now: float, now_ns: int) -> "PhaseTotals":
        """Return the totals at the moment when another phase begins."""
        recoveries = self.recoveries + (phase == "Recovering")
        return replace(self, phase=phase, since=now, since_ns=now_ns, before=self.until(now), recoveries=recoveries)

    def until(self, now: float) -> dict[str, float]:
        """Return seconds by phase, including the one in progress."""
        return {**self.before, self.phase: self.before.get(self.phase, 0.0) + max(0.0, now - self.since)}
