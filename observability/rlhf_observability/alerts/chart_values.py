"""Alert settings of a cluster: the section `alerts` of the chart's values.yaml and its schema.

Rule: this section and its schema are generated from the families; the rest of both files keeps its content. The schema
rejects values that no alert has.
"""

import json
import textwrap
from collections.abc import Iterable
from typing import Any, Final

from rlhf_observability.alerts.alert import DURATION, Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.rule_file import RUNBOOKS

BEGIN: Final = "# ---- alerts: written by `make alerts`\n"
END: Final = "# ---- end of alerts\n"
_WIDTH: Final = 120
DEFINITIONS: Final[dict[str, Any]] = {
    "alertDuration": {"type": "string", "pattern": f"^({DURATION.pattern})$"},
    "alertSeverity": {"enum": [severity.value for severity in AlertSeverity]},
}
"""Schemas that the properties of all alerts refer to."""


def with_section(values_yaml: str, families: Iterable[Family]) -> str:
    """Return values.yaml with its section of alerts regenerated, or appended if the file has neither mark.

    Raises ValueError if the file has one mark without the other, since the end of the section is then unknown.
    """
    before, begun, rest = values_yaml.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if begun and not ended:
        raise ValueError(f"values.yaml has no line {END.strip()!r} after {BEGIN.strip()!r}: restore it")
    if not begun and END in values_yaml:
        raise ValueError(f"values.yaml has no line {BEGIN.strip()!r} before {END.strip()!r}: restore it")
    return before + ("" if begun else "\n") + BEGIN + section(families) + END + after


def section(families: Iterable[Family]) -> str:
    """Return the section of values.yaml."""
    lines = [
        "alerts:",
        "  # -- Create a PrometheusRule with the rules below. It needs the definitions of the Prometheus operator. A",
        "  # Prometheus without that operator can load alerts/rlhf-operator.rules.yaml.",
        "  enabled: false",
        "  # -- Labels by which your Prometheus selects PrometheusRules.",
        "  labels: {}",
        "  # -- Labels added to every alert, such as a team, for the routes of Alertmanager.",
        "  alertLabels: {}",
        "  # -- Address of the runbook pages, for the links in alerts.",
        f"  runbookUrl: {RUNBOOKS}",
        "  # -- Settings of each alert, by its name: enabled, the time for which its condition must hold, its severity",
        "  # (critical, warning or info), and its thresholds. The comment says when the alert fires.",
        "  rules:",
    ]
    for family in families:
        for alert in family.alerts:
            lines += _rule(alert)
    return "\n".join(lines) + "\n"


def with_schema(schema_json: str, families: Iterable[Family]) -> str:
    """Return values.schema.json with its property of alerts and their definitions regenerated."""
    document = json.loads(schema_json)
    document["definitions"] |= DEFINITIONS
    document["properties"]["alerts"] = schema(families)
    return json.dumps(document, indent=2) + "\n"


def schema(families: Iterable[Family]) -> dict[str, Any]:
    """Return the JSON schema of the section."""
    rules = {alert.name: _schema(alert) for family in families for alert in family.alerts}
    return _closed(
        {
            "enabled": {"type": "boolean"},
            "labels": {"$ref": "#/definitions/labels"},
            "alertLabels": {
                "type": "object",
                "propertyNames": {"pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$", "not": {"enum": ["severity", "alertname"]}},
                "additionalProperties": {"type": "string"},
            },
            "runbookUrl": {"type": "string", "pattern": "^https?://[^ ]*[^ /]$"},
            "rules": _closed(rules),
        }
    )


def _rule(alert: Alert) -> list[str]:
    comment = textwrap.wrap(f"{alert.when}.", _WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    values = {"enabled": "true", "for": alert.lasts, "severity": alert.severity.value, **alert.values()}
    flow = ", ".join(f"{name}: {value}" for name, value in values.items())
    return [*(f"    # {line}" for line in comment), f"    {alert.name}: {{{flow}}}"]


def _schema(alert: Alert) -> dict[str, Any]:
    return _closed(
        {
            "enabled": {"type": "boolean"},
            "for": {"$ref": "#/definitions/alertDuration"},
            "severity": {"$ref": "#/definitions/alertSeverity"},
            **{threshold.name: _threshold(threshold) for threshold in alert.thresholds},
        }
    )


def _threshold(threshold: Threshold) -> dict[str, Any]:
    kind = "integer" if isinstance(threshold.default, int) else "number"
    result = {"type": kind, "description": threshold.meaning, "minimum": threshold.least}
    return result if threshold.most is None else result | {"maximum": threshold.most}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}
