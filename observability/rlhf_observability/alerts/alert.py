"""What an alert is: when it fires, how bad that is, what it says, and which of its numbers a cluster may change.

Rule: pure data, checked when it is made, so that a threshold that no expression reads, or a placeholder that no value
fills, ends the import and not somebody's night. Nothing here knows of Helm or of files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PLACEHOLDER: Final = re.compile(r"<([a-z][A-Za-z]*)>")
"""Where a threshold stands in an expression or a text: `<atLeastSeconds>`."""
DURATION: Final = re.compile(r"([1-9][0-9]*(s|m|h|d))+|0s")
"""A duration as Prometheus reads it."""
NAME: Final = re.compile(r"RLHF[A-Za-z]+")


class AlertSeverity(StrEnum):
    """Who is shown of it, and when."""

    CRITICAL = "critical"
    """Pages somebody at night: it loses work or money now, and does not mend itself."""
    WARNING = "warning"
    """Somebody looks the next morning."""
    INFO = "info"
    """Shown, and sent to nobody."""


@dataclass(frozen=True)
class Threshold:
    """A number of an alert that a value of the chart sets."""

    name: str
    """Under `alerts.rules.<alert>` in the chart's values."""
    default: float
    """In the unit that `meaning` says. A whole number takes whole numbers only, as the range of a query must be."""
    meaning: str
    """A clause for values.yaml and the reference page."""
    most: float | None = None
    """The largest number that makes sense; None: there is none."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that every alert has a value of."""
        if self.name in ("enabled", "for", "severity"):
            raise ValueError(f"threshold {self.name}: every alert has a value of this name")

    @property
    def text(self) -> str:
        """The default as PromQL and YAML read it."""
        return f"{self.default:.12g}"

    @property
    def least(self) -> int:
        """The least number that makes sense: no range of a query is empty."""
        return 1 if self.name in ("windowSeconds", "recentSeconds") else 0


@dataclass(frozen=True)
class Alert:
    """One alert."""

    name: str
    severity: AlertSeverity
    when: str
    """A clause for tables: fires when ..."""
    expression: str
    """PromQL over series of the catalogue, with `<threshold>` where a value goes."""
    lasts: str
    """How long it must hold without a gap: `for` of the rule."""
    summary: str
    """One line that names job and figure, by Prometheus' templates."""
    description: str
    """What it means and what to do first, by Prometheus' templates."""
    normal: str
    """What the figure is in a healthy job or operator."""
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for placeholders without a threshold, thresholds that nothing reads, and bad forms."""
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r}: names of alerts begin with RLHF and have letters only")
        if not DURATION.fullmatch(self.lasts):
            raise ValueError(f"{self.name}: lasts: {self.lasts!r} is no duration such as 30m")
        known = {threshold.name for threshold in self.thresholds}
        read = set(PLACEHOLDER.findall(self.expression))
        shown = set(PLACEHOLDER.findall(self.summary + self.description))
        if read != known or shown - known:
            raise ValueError(
                f"{self.name}: thresholds {sorted(known)}, expression reads {sorted(read)}, texts {sorted(shown)}"
            )

    @property
    def anchor(self) -> str:
        """The anchor of its section in the runbook of its family."""
        return self.name.lower()

    def values(self) -> dict[str, str]:
        """Threshold -> its default as text."""
        return {threshold.name: threshold.text for threshold in self.thresholds}


@dataclass(frozen=True)
class Recording:
    """A series that is computed once for all rules and panels that read it."""

    name: str
    expression: str
    why: str
    """Why it pays."""


@dataclass(frozen=True)
class Family:
    """Alerts with one runbook page and one rule group."""

    name: str
    """Of the page docs/runbooks/<name>.md and the group rlhf-<name>."""
    about: str
    """A clause: what these alerts watch."""
    alerts: tuple[Alert, ...]
    recordings: tuple[Recording, ...] = ()


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with every placeholder replaced. Raises KeyError for one without a value."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], text)
