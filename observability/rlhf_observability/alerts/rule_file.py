"""The rules as a Prometheus rule file, and as data that the chart's template fills with a cluster's values.

Rule: pure; both come from the same families.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from rlhf_observability.alerts.alert import Alert, Family, filled

RUNBOOKS: Final = "https://github.com/rlhf-operator/rlhf-operator/blob/main/docs/runbooks"
"""Default location of runbook pages (value alerts.runbookUrl), without a trailing slash."""
HEADER: Final = """\
# Alerts and recording rules of rlhf-operator for a Prometheus without the Prometheus operator, with the thresholds that
# the chart has by default: put the file under rule_files. Written by `make alerts`; docs/alerts.md explains each.
"""


def rule_file(families: Iterable[Family], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the content of a rule file, without the alerts that are disabled.

    `overrides`: alert -> overrides of its defaults, as under alerts.rules of the chart.
    """
    overrides = overrides or {}
    return {
        "groups": [
            {
                "name": f"rlhf-{family.name}",
                "rules": [
                    *({"record": each.name, "expr": each.expression} for each in family.recordings),
                    *(
                        _rule(family, alert, overrides.get(alert.name, {}))
                        for alert in family.alerts
                        if overrides.get(alert.name, {}).get("enabled", True)
                    ),
                ],
            }
            for family in families
        ]
    }


def rule_file_text(families: Iterable[Family]) -> str:
    """Return the text of the file with the defaults of all alerts."""
    return HEADER + yaml.dump(rule_file(families), Dumper=_BlockDumper, sort_keys=False, width=120, allow_unicode=True)


class _BlockDumper(yaml.SafeDumper):
    """Writes multi-line queries as block text."""


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def chart_data(families: Iterable[Family]) -> dict[str, Any]:
    """Return the data of the chart's template: expressions and texts with placeholders, and their defaults."""
    return {
        "runbooks": RUNBOOKS,
        "groups": [
            {
                "name": f"rlhf-{family.name}",
                "recordings": [{"record": each.name, "expr": each.expression} for each in family.recordings],
                "alerts": [_chart_alert(family, alert) for alert in family.alerts],
            }
            for family in families
        ],
    }


def _chart_alert(family: Family, alert: Alert) -> dict[str, Any]:
    return {
        "name": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "severity": alert.severity.value,
        "summary": alert.summary,
        "description": alert.description,
        "runbook": f"{family.name}.md#{alert.anchor}",
        "thresholds": {threshold.name: threshold.default for threshold in alert.thresholds},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.12g}"


def _rule(family: Family, alert: Alert, overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = alert.values() | {name: _text(value) for name, value in overrides.items()}
    return {
        "alert": alert.name,
        "expr": filled(alert.expression, values),
        "for": values.get("for", alert.lasts),
        "labels": {"severity": values.get("severity", alert.severity.value)},
        "annotations": {
            "summary": filled(alert.summary, values),
            "description": filled(alert.description, values),
            "runbook_url": f"{RUNBOOKS}/{family.name}.md#{alert.anchor}",
        },
    }
