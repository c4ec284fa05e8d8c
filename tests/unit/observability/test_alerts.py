"""Alerts as data: generated files are up to date, and every alert leads to instructions."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from tests.support.jobs.documented_commands import parse_rlhf, verb_of
from tests.support.observability.alert_scenarios import SCENARIOS
from tests.support.observability.promql_reading import Reader
from tests.support.observability.promtool_files import Firing, promtool_file

from rlhf_api.job.groups import ComputeType
from rlhf_common.metrics.catalogue import BY_NAME
from rlhf_observability.alerts import chart_values
from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold, filled
from rlhf_observability.alerts.families import FAMILIES
from rlhf_observability.alerts.generated_files import generated_files
from rlhf_observability.alerts.rule_file import rule_file

ROOT = Path(__file__).parents[3]
ALERTS = [(family, alert) for family in FAMILIES for alert in family.alerts]
PARTS = ("It means", "You see", "Look", "Likely causes", "Cure", "Silence")
KUBECTL = {"get", "describe", "logs", "delete", "top", "exec", "rollout", "auth", "scale", "patch", "create", "label"}
KUBECTL |= {"cordon"}
each_alert = pytest.mark.parametrize(("family", "alert"), ALERTS, ids=[alert.name for _, alert in ALERTS])


def test_what_is_written_of_the_alerts_is_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in generated_files(ROOT).items() if path.read_text() != text]
    assert not stale, "run `make alerts`"


def test_names_are_unique_and_a_page_belongs_to_a_family() -> None:
    assert len({alert.name for _, alert in ALERTS}) == len(ALERTS)
    assert {path.stem for path in (ROOT / "docs" / "runbooks").glob("*.md")} == {family.name for family in FAMILIES}


def section(family: Family, alert: Alert) -> str:
    page = (ROOT / "docs" / "runbooks" / f"{family.name}.md").read_text()
    assert f"\n## {alert.name}\n" in page, f"docs/runbooks/{family.name}.md has no section {alert.name}"
    return page.split(f"\n## {alert.name}\n", 1)[1].split("\n## ", 1)[0]


@each_alert
def test_the_runbook_says_what_it_means_what_tells_more_and_the_cure(family: Family, alert: Alert) -> None:
    text = section(family, alert)
    found = re.findall(r"^\*\*([^*]+)\*\*:", text, re.MULTILINE)
    assert tuple(found) == PARTS
    assert re.search(r"^\*\*Likely causes\*\*: 1\. ", text, re.MULTILINE)


@each_alert
def test_commands_of_the_runbook_exist_and_take_what_they_are_given(family: Family, alert: Alert) -> None:
    text = section(family, alert)
    lines = re.search(r"^\*\*Look\*\*:\n\n```sh\n(.+?)```", text, re.MULTILINE | re.DOTALL)
    assert lines, "no block of commands after Look"
    commands = [*lines[1].splitlines(), *re.findall(r"`((?:rlhf|kubectl) [^`]+)`", text)]
    for command in commands:
        check(command)


def check(command: str) -> None:
    program, *arguments = shlex.split(command.partition(" | ")[0].partition(" && ")[0])
    if program == "kubectl" and arguments[0] != "rlhf":
        assert arguments[0] in KUBECTL, command
        return
    assert program == "rlhf", command
    if arguments[1:]:  # else it is named in a sentence
        parse_rlhf(arguments)
    else:
        verb_of(arguments)


@each_alert
def test_a_query_asks_only_for_series_labels_and_values_that_processes_serve(family: Family, alert: Alert) -> None:
    recorded = {each.name: each.expression for each in family.recordings}
    asked = [filled(alert.expression, alert.values()), *recorded.values()]
    for name in recorded:
        asked = [query.replace(name, "rlhf_phase") for query in asked]  # what it is recorded of, with the same labels
    for selected in [each for query in asked for each in Reader(BY_NAME).selected(query)]:
        labels = {label.name: label for label in selected.metric.labels}
        for name, value in selected.matchers.items():
            assert name in labels, f"{selected.name} has no label {name}"
            assert set(value.split("|")) <= set(labels[name].values or value.split("|")), f"{selected.name} {name}"


@each_alert
def test_a_query_answers_with_the_labels_that_its_texts_name(family: Family, alert: Alert) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", alert.expression))))
    recorded = "".join(each.expression for each in family.recordings if each.name in alert.expression)
    assert named <= grouped | set(re.findall(r"\w+", recorded))


@each_alert
def test_texts_name_where_and_how_much(family: Family, alert: Alert) -> None:
    assert "$labels.namespace" in alert.summary
    assert "\n" not in alert.summary + alert.description
    assert not alert.when.endswith(".")
    assert not alert.normal.endswith(".")


def test_a_text_about_no_operator_at_all_names_no_namespace() -> None:
    """It once ended with "in namespace " and nothing after it."""
    [absent] = [
        each for each in SCENARIOS if each.alert == "RLHFOperatorAbsent" and (Firing("", {}),) in each.seen.values()
    ]
    [test] = promtool_file([absent], "rules.yaml")["tests"]
    [alert] = [alert for moment in test["alert_rule_test"] for alert in moment["exp_alerts"]]
    assert alert["exp_annotations"]["summary"] == "Prometheus scrapes no operator"


def test_texts_name_no_number_type_that_a_job_cannot_have() -> None:
    """They once said that a few skipped steps are normal in float16, which no field allows."""
    texts = [f"{alert.when} {alert.description} {alert.normal}" for _, alert in ALERTS]
    texts += [f"{metric.meaning} {metric.normal}" for metric in BY_NAME.values()]
    types = {found for text in texts for found in re.findall(r"\bb?float\d+\b", text)}
    assert types <= {str(name).lower() for name in get_args(ComputeType)}


def test_a_threshold_that_nothing_reads_and_a_placeholder_without_one_are_refused() -> None:
    def build(expression: str, *thresholds: Threshold) -> Alert:
        return Alert("RLHFX", AlertSeverity.INFO, "", expression, "1m", "", "", "", thresholds)

    assert build("a > <most>", Threshold("most", 3, "")).values() == {"most": "3"}
    with pytest.raises(ValueError, match=r"\['most'\], expression reads \[\]"):
        build("a > 3", Threshold("most", 3, ""))
    with pytest.raises(ValueError, match=r"thresholds \[\], expression reads \['most'\]"):
        build("a > <most>")
    with pytest.raises(ValueError, match="every alert has a value"):
        Threshold("for", 5, "")


def test_values_with_one_of_the_two_marks_are_refused_and_lose_nothing() -> None:
    values = f"first: 1\n{chart_values.BEGIN}old\n{chart_values.END}last: 2\n"
    assert chart_values.with_section(values, FAMILIES).endswith(f"{chart_values.END}last: 2\n")
    for mark in (chart_values.BEGIN, chart_values.END):
        with pytest.raises(ValueError, match=re.escape(f"values.yaml has no line {mark.strip()!r}")):
            chart_values.with_section(values.replace(mark, ""), FAMILIES)


def test_values_without_a_section_get_one_at_their_end() -> None:
    written = chart_values.with_section("first: 1\n", FAMILIES)
    assert written == f"first: 1\n\n{chart_values.BEGIN}{chart_values.section(FAMILIES)}{chart_values.END}"


def test_a_rule_file_leaves_out_alerts_that_are_disabled() -> None:
    def alerts(overrides: dict[str, dict[str, bool]]) -> set[str]:
        return {
            rule["alert"]
            for group in rule_file(FAMILIES, overrides)["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }

    every = {alert.name for _, alert in ALERTS}
    assert alerts({"RLHFKLRunaway": {"enabled": False}}) == every - {"RLHFKLRunaway"}
    assert alerts({"RLHFKLRunaway": {"enabled": True}}) == every


def test_each_share_says_what_it_is_a_share_of() -> None:
    shares = [each.meaning for _, alert in ALERTS for each in alert.thresholds if each.name == "share"]
    assert len(shares) == len(set(shares)) > 1
