"""Checks the alerts with Prometheus' own tools.

The rules are valid, and each alert fires in its scenarios and in no similar ones
(tests/support/observability/alert_scenarios).
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.releases.chart import CHART, RELEASE, render
from tests.cluster.toolchain import binary
from tests.support.observability.alert_scenarios import SCENARIOS
from tests.support.observability.promtool_files import promtool_file

from rlhf_observability.alerts.families import FAMILIES
from rlhf_observability.alerts.rule_file import rule_file

pytestmark = pytest.mark.full


RULES = CHART / "alerts" / "rlhf-operator.rules.yaml"
ALERTS = [alert for family in FAMILIES for alert in family.alerts]


def promtool(*arguments: str) -> None:
    """Run promtool; raise AssertionError with its output if it reports an error."""
    done = subprocess.run([str(binary("promtool")), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rule_file_is_valid() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_every_alert_fires_in_its_scenario_and_is_silent_in_the_others(tmp_path: Path) -> None:
    files = []
    for family in FAMILIES:
        for (
            alert
        ) in family.alerts:  # one rule per file: promtool evaluates all rules of a file at every step of a scenario
            rules, asked = tmp_path / f"{alert.name}.yaml", tmp_path / f"{alert.name}.test.yaml"
            rules.write_text(yaml.safe_dump(rule_file([replace(family, alerts=(alert,))])))
            of_alert = [scenario for scenario in SCENARIOS if scenario.alert == alert.name]
            asked.write_text(yaml.safe_dump(promtool_file(of_alert, rules.name), sort_keys=False))
            files.append(str(asked))
    promtool("test", "rules", *files)


@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_every_alert_has_scenarios_of_firing_and_of_silence(alert: str) -> None:
    moments = [bool(firings) for each in SCENARIOS if each.alert == alert for firings in each.seen.values()]
    assert True in moments
    assert [each for each in SCENARIOS if each.alert == alert and not any(each.seen.values())]


def test_a_cluster_may_turn_alerts_off_label_them_and_keep_runbooks_of_its_own() -> None:
    values = {
        "alertLabels": {"team": "rl"},
        "runbookUrl": "https://wiki.example.org/rlhf",
        "rules": {"RLHFKLRunaway": {"enabled": False}, "RLHFGPUIdle": {"severity": "info"}},
    }
    rules = {rule["alert"]: rule for group in rules_of(values)["groups"] for rule in group["rules"] if "alert" in rule}
    assert set(rules) == {alert.name for alert in ALERTS} - {"RLHFKLRunaway"}
    assert rules["RLHFGPUIdle"]["labels"] == {"severity": "info", "team": "rl"}
    assert rules["RLHFGPUIdle"]["annotations"]["runbook_url"] == "https://wiki.example.org/rlhf/workers.md#rlhfgpuidle"


def test_values_of_a_chart_before_alerts_still_render() -> None:
    assert ("PrometheusRule", RELEASE) not in render({"alerts": None})
    assert rules_of({"rules": None, "runbookUrl": None}) == rule_file(FAMILIES)


def rules_of(values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = render({"alerts": {"enabled": True, **values}})["PrometheusRule", RELEASE]["spec"]
    return spec


def test_the_charts_rules_are_those_of_the_file_unless_values_say_otherwise() -> None:
    assert ("PrometheusRule", RELEASE) not in render()
    assert rules_of({}) == rule_file(FAMILIES)
    overrides: dict[str, dict[str, Any]] = {
        "RLHFJobStuck": {"trainingSeconds": 7200, "for": "1m"},
        "RLHFKLRunaway": {"natsPerToken": 0.25},
    }
    assert rules_of({"rules": overrides}) == rule_file(FAMILIES, overrides)
