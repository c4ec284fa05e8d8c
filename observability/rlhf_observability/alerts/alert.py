"""The definition of an alert: its condition, severity, texts, and the thresholds that a cluster may change.

Rule: pure data, checked at creation, so that an unused threshold, or a placeholder of the rule without a value, fails
at import.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PLACEHOLDER: Final = re.compile(r"<([a-z][A-Za-z]*)>")
"""Placeholder of a threshold in an expression or a text: `<atLeastSeconds>`."""
DURATION: Final = re.compile(r"([1-9][0-9]*(s|m|h|d))+|0s")
"""Durations such as 1h30m: positive numbers of d, h, m and s; or 0s."""
NAME: Final = re.compile(r"RLHF[A-Za-z]+")


class AlertSeverity(StrEnum):
    """Urgency of an alert, for the routes of Alertmanager."""

    CRITICAL = "critical"
    """A person should be paged, also at night."""
    WARNING = "warning"
    """A person should look the next morning."""
    INFO = "info"
    """To be displayed without notification."""


@dataclass(frozen=True)
class Threshold:
    """A number in an alert that a value of the chart sets."""

    name: str
    """Key below `alerts.rules.<alert>` in the chart's values."""
    default: float
    """Default, in the unit in `meaning`. With an integer default, the chart's schema accepts only integers."""
    meaning: str
    """A phrase for the schema of the chart's values."""
    most: float | None = None
    """Maximum sensible value; None: no maximum."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that every alert already uses as a value."""
        if self.name in ("enabled", "for", "severity"):
            raise ValueError(f"threshold {self.name}: every alert has a value of this name")

    @property
    def text(self) -> str:
        """The default in the syntax of PromQL and YAML."""
        return f"{self.default:.12g}"

    @property
    def least(self) -> int:
        """Minimum sensible value, so that no range of a query is empty."""
        return 1 if self.name in ("windowSeconds", "recentSeconds") else 0


@dataclass(frozen=True)
class Alert:
    """One alert."""

    name: str
    severity: AlertSeverity
    when: str
    """Clause after "fires when", with `<threshold>` as placeholders, for tables and values.yaml."""
    expression: str
    """PromQL with `<threshold>` as placeholders of values."""
    lasts: str
    """Duration for which it must hold continuously: `for` of the rule."""
    summary: str
    """One line, as a Prometheus template."""
    description: str
    """Meaning and first step, as a Prometheus template."""
    normal: str
    """Value in a healthy job or operator."""
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for placeholders of the rule without a threshold, thresholds that the expression does not
        use, and an invalid name or duration.
        """
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r}: names of alerts begin with RLHF and have letters only")
        if not DURATION.fullmatch(self.lasts):
            raise ValueError(f"{self.name}: lasts: {self.lasts!r} is no duration such as 30m")
        declared = {threshold.name for threshold in self.thresholds}
        read = set(PLACEHOLDER.findall(self.expression))
        shown = set(PLACEHOLDER.findall(self.summary + self.description))
        if read != declared or shown - declared:
            raise ValueError(
                f"{self.name}: thresholds {sorted(declared)}, expression reads {sorted(read)}, texts {sorted(shown)}"
            )

    @property
    def anchor(self) -> str:
        """Anchor of its section in the runbook of its family."""
        return self.name.lower()

    def values(self) -> dict[str, str]:
        """Threshold -> its default as text."""
        return {threshold.name: threshold.text for threshold in self.thresholds}


@dataclass(frozen=True)
class Recording:
    """A series that a recording rule computes."""

    name: str
    expression: str
    why: str
    """Reason for the recording."""


@dataclass(frozen=True)
class Family:
    """Alerts with one runbook page and one rule group."""

    name: str
    """Name of the page docs/runbooks/<name>.md and the group rlhf-<name>."""
    about: str
    """Noun phrase: the subject of these alerts."""
    alerts: tuple[Alert, ...]
    recordings: tuple[Recording, ...] = ()


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with every placeholder replaced. Raises KeyError for one without a value."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], text)
