"""The input of `promtool test rules` for every alert: series, and the times when it fires or does not.

Rule: a scenario has series in promtool's notation, and the figure as shown in the alert's text; the text itself is the
alert's. Runs nothing.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_observability.alerts.alert import Alert, filled
from rlhf_observability.alerts.families import FAMILIES
from rlhf_observability.alerts.rule_file import RUNBOOKS

INTERVAL: Final = "30s"
"""Time between two scrapes and two evaluations, the default of Prometheus and the chart."""
JOB: Final = {"namespace": "team", "rlhf_job": "tiny"}
_LABEL: Final = re.compile(r"\{\{ *\$labels\.(\w+) *\}\}")
_IF_LABEL: Final = re.compile(r"\{\{ *if \$labels\.(\w+) *\}\}(.*?)\{\{ *end *\}\}")
_VALUE: Final = re.compile(r"\{\{ *\$value[^}]*\}\}")


@dataclass(frozen=True)
class Firing:
    """An expected alert."""

    figure: str = ""
    """The value as the text shows it."""
    labels: Mapping[str, str] = field(default_factory=lambda: JOB)
    """Its labels without `severity`."""


@dataclass(frozen=True)
class AlertScenario:
    """A scenario of a job or an operator, with the expected alerts."""

    alert: str
    story: str
    series: Mapping[str, str]
    """Series -> values, one every INTERVAL, in promtool's notation: `0x10 1+2x5 _x3 stale`."""
    seen: Mapping[str, tuple[Firing, ...]]
    """Time since the first value, such as 20m -> the alerts that fire then; () for none."""


def of_job(name: str, values: str, /, *, instance: str = "10.0.0.1:7790", **labels: str) -> dict[str, str]:
    """Return a series of the job's coordinator, with the labels of a scrape of its pod."""
    return series(name, values, **JOB, pod="tiny-coordinator", instance=instance, **labels)


def of_operator(name: str, values: str, /, *, instance: str = "10.0.9.1:8080", **labels: str) -> dict[str, str]:
    """Return a series of the operator; `**JOB` adds the labels of a job."""
    return series(name, values, **({"namespace": "rlhf-system", "job": "rlhf"} | labels), instance=instance)


def series(name: str, values: str, /, **labels: str) -> dict[str, str]:
    """Return one series."""
    written = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {f"{name}{{{written}}}": values}


def phase(values: str, name: str = "Running") -> dict[str, str]:
    """Return the job's phase as the operator sees it."""
    return of_operator("rlhf_job_phase", values, **JOB, phase=name)


def fires(
    alert: str, story: str, series: Mapping[str, str], moment: str, figure: str = "", before: str = "", **labels: str
) -> AlertScenario:
    """Return a scenario in which the job's alert fires at a moment, with further labels, and not yet `before`."""
    seen = {before: ()} if before else {}
    return AlertScenario(alert, story, series, seen | {moment: (Firing(figure, JOB | labels),)})


def silent(alert: str, story: str, series: Mapping[str, str], *moments: str) -> AlertScenario:
    """Return a scenario in which the alert never fires."""
    return AlertScenario(alert, story, series, dict.fromkeys(moments, ()))


def promtool_file(scenarios: Iterable[AlertScenario], rule_file: str) -> dict[str, Any]:
    """Return the content of a file for `promtool test rules`."""
    return {
        "rule_files": [rule_file],
        "evaluation_interval": INTERVAL,
        "tests": [
            {
                "name": f"{scenario.alert}: {scenario.story}",
                "interval": INTERVAL,
                "input_series": [{"series": name, "values": values} for name, values in scenario.series.items()],
                "alert_rule_test": [
                    {
                        "eval_time": moment,
                        "alertname": scenario.alert,
                        "exp_alerts": [_expected(scenario.alert, firing) for firing in firings],
                    }
                    for moment, firings in scenario.seen.items()
                ],
            }
            for scenario in scenarios
        ],
    }


def _expected(name: str, firing: Firing) -> dict[str, Any]:
    family, alert = next((family, alert) for family in FAMILIES for alert in family.alerts if alert.name == name)
    return {
        "exp_labels": {**firing.labels, "severity": alert.severity.value},
        "exp_annotations": {
            "summary": _shown(alert, alert.summary, firing),
            "description": _shown(alert, alert.description, firing),
            "runbook_url": f"{RUNBOOKS}/{family.name}.md#{alert.anchor}",
        },
    }


def _shown(alert: Alert, text: str, firing: Firing) -> str:
    written = _IF_LABEL.sub(lambda found: found[2] if firing.labels.get(found[1]) else "", filled(text, alert.values()))
    filled_in = _LABEL.sub(lambda found: firing.labels.get(found[1], ""), written)
    return _VALUE.sub(firing.figure, filled_in)
