"""The tables of docs/alerts.md: conditions of the alerts with default thresholds, and links to runbooks.

Rule: the part of the page between two marks is generated from the families; people write the rest.
"""

from collections.abc import Iterable
from typing import Final

from rlhf_observability.alerts.alert import Alert, Family, filled

BEGIN: Final = "<!-- alerts: written by `make alerts` -->\n"
END: Final = "<!-- end of alerts -->\n"


def with_tables(page: str, families: Iterable[Family]) -> str:
    """Return the page with its tables regenerated. Raises ValueError for a page without the two marks."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"docs/alerts.md has no lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n".join(_table(family) for family in families) + END + after


def _table(family: Family) -> str:
    lines = [
        f"\n### {family.name.capitalize()}: {family.about}\n",
        "| alert | severity | fires when | for | thresholds | normal |",
        "|---|---|---|---|---|---|",
        *(_row(family, alert) for alert in family.alerts),
    ]
    if family.recordings:
        lines += ["", "| recording | expression | reason |", "|---|---|---|"]
        lines += [f"| `{each.name}` | `{_cell(each.expression)}` | {each.why} |" for each in family.recordings]
    return "\n".join(lines) + "\n"


def _row(family: Family, alert: Alert) -> str:
    thresholds = ", ".join(f"`{threshold.name}` {threshold.text}" for threshold in alert.thresholds)
    when = filled(alert.when, alert.values())
    link = f"[{alert.name}](runbooks/{family.name}.md#{alert.anchor})"
    return f"| {link} | {alert.severity.value} | {when} | {alert.lasts} | {thresholds} | {alert.normal} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
