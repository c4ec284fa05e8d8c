"""What a cause answers, and what a cause is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rlhf_planner.explain.iteration_profile import IterationProfile

MIN_SHARE: Final = 0.03
"""Of an iteration: a smaller loss is noise, and no finding."""
MAX_CHARACTERS: Final = 400
"""Characters: a status holds three of them."""


@dataclass(frozen=True)
class Finding:
    """One loss."""

    cause: str
    seconds: float
    """Of an iteration: what would be gained, where that is known; else what is spent on it, all of which cannot be."""
    share: float
    """The same of the iteration, 0..1."""
    summary: str
    """What happens, in words with numbers."""
    field: str = ""
    """Field that changes it; empty: none does."""
    value: str = ""
    """What to set it to."""
    remedy: str = ""
    """What to do where no field helps."""
    gain: float | None = None
    """How many times as fast an iteration would be; None: not known."""
    how: str = ""
    """How the gain was computed, or why it is not known."""

    @property
    def words(self) -> str:
        """Return all of it as one paragraph of at most MAX_CHARACTERS characters."""
        change = f"set {self.field} to {self.value}" if self.field else self.remedy
        gain = f"{self.gain:.2f} times as fast, {self.how}" if self.gain is not None else f"gain not known: {self.how}"
        text = f"{self.summary}; {change}: {gain}" if change else f"{self.summary}; {gain}"
        return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


class LossCause(Protocol):
    """One reason for which an iteration takes long."""

    name: str

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """Return the loss by this cause in iterations of one job, oldest first, at least one; None: there is none, or
        nothing that is known well."""


def gained(
    cause: str,
    facts: Sequence[IterationProfile],
    saved: float,
    summary: str,
    how: str,
    *,
    field: str = "",
    value: str = "",
    remedy: str = "",
) -> Finding | None:
    """Return the finding that so many seconds of a mean iteration would be saved; None where that is noise."""
    total = mean_total(facts)
    if total <= 0 or saved < MIN_SHARE * total:
        return None
    gain = total / max(total - saved, 1e-9)
    return Finding(cause, saved, saved / total, summary, field, value, remedy, gain, how)


def spent(
    cause: str,
    facts: Sequence[IterationProfile],
    seconds: float,
    summary: str,
    why: str,
    *,
    field: str = "",
    value: str = "",
    remedy: str = "",
) -> Finding | None:
    """Return the finding that so many seconds of a mean iteration are spent on something whose gain is not known."""
    total = mean_total(facts)
    if total <= 0 or seconds < MIN_SHARE * total:
        return None
    return Finding(cause, seconds, seconds / total, summary, field, value, remedy, None, why)


def mean_total(facts: Sequence[IterationProfile]) -> float:
    """Return the seconds of an iteration, mean."""
    return sum(one.total for one in facts) / len(facts)


def mean_seconds(facts: Sequence[IterationProfile], phase: str) -> float:
    """Return the seconds of a phase, mean."""
    return sum(one.seconds(phase) for one in facts) / len(facts)
