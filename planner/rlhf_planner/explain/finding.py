"""The interface of a cause, and the finding that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rlhf_planner.explain.iteration_profile import IterationProfile

MIN_SHARE: Final = 0.03
"""Share of an iteration below which a loss is noise and no finding."""
MAX_CHARACTERS: Final = 400
"""Maximum length of a finding's text in characters."""


@dataclass(frozen=True)
class Finding:
    """One loss of time, with its cause."""

    cause: str
    seconds: float
    """Seconds per iteration: the gain if known, otherwise the time spent, part of which may be necessary."""
    share: float
    """`seconds` as a share of a mean iteration."""
    summary: str
    """Description of the loss, with numbers."""
    field: str = ""
    """Field to change; empty if no field helps."""
    value: str = ""
    """Suggested value of the field."""
    remedy: str = ""
    """Suggestion where no field helps; may be empty."""
    gain: float | None = None
    """Factor by which an iteration would be faster; None if unknown."""
    how: str = ""
    """How the gain was computed, or why it is unknown."""

    @property
    def words(self) -> str:
        """Return the finding as one paragraph of at most MAX_CHARACTERS characters."""
        change = f"set {self.field} to {self.value}" if self.field else self.remedy
        gain = f"{self.gain:.2f} times as fast, {self.how}" if self.gain is not None else f"gain not known: {self.how}"
        text = f"{self.summary}; {change}: {gain}" if change else f"{self.summary}; {gain}"
        return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


class LossCause(Protocol):
    """One reason why an iteration takes long."""

    name: str

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """Return the loss of this cause, or None if there is none or it is not known well.

        `facts` are one or more iterations of one job, oldest first.
        """


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
    """Return the finding that a mean iteration would save `saved` seconds; None if that is noise, or without iteration
    time."""
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
    """Return the finding that a mean iteration spends `seconds` on a cause whose gain is unknown; None if that is
    noise, or without iteration time."""
    total = mean_total(facts)
    if total <= 0 or seconds < MIN_SHARE * total:
        return None
    return Finding(cause, seconds, seconds / total, summary, field, value, remedy, None, why)


def mean_total(facts: Sequence[IterationProfile]) -> float:
    """Return the mean seconds of an iteration."""
    return sum(profile.total for profile in facts) / len(facts)


def mean_seconds(facts: Sequence[IterationProfile], phase: str) -> float:
    """Return the mean seconds of a phase."""
    return sum(profile.seconds(phase) for profile in facts) / len(facts)
