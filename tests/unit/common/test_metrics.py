"""The catalogue of metrics follows its rules: base units, one meaning per name, bounded labels."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.syntax import nodes

from rlhf_common.metrics import job, labels, page, samples
from rlhf_common.metrics.catalogue import BY_NAME, METRICS, served_by
from rlhf_common.metrics.metric import Label, Metric, MetricKind, Server
from rlhf_common.names import PHASES

ROOT = Path(__file__).parents[3]
SHIPPED = ("common", "api", "operator", "coordinator", "workers", "planner", "cli")
MOST_SERIES = {Server.OPERATOR: 60_000, Server.COORDINATOR: 8_400, Server.WORKER: 68}
"""Maximum series of one process at 1,000 jobs, and at 1,024 workers; the documented cost of a scrape depends on it."""
SET_BY_PROMETHEUS = frozenset({"job", "instance", "pod", "container", "endpoint", "service"})


def test_no_two_series_have_one_name() -> None:
    names = [name for metric in METRICS for name in metric.sample_names]
    assert len(names) == len(set(names))
    assert set(BY_NAME) == {metric.name for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_labels_leave_those_of_a_scrape_alone(metric: Metric) -> None:
    assert not SET_BY_PROMETHEUS & set(metric.label_names)
    if Server.OPERATOR not in metric.servers:
        assert not {"namespace", "rlhf_job"} & set(metric.label_names)
    assert len(set(metric.label_names)) == len(metric.label_names)


@pytest.mark.parametrize("server", Server)
def test_series_of_a_process_are_bounded(server: Server) -> None:
    assert sum(metric.series for metric in served_by(server)) <= MOST_SERIES[server]


def test_a_histogram_costs_its_buckets_and_three_more() -> None:
    assert samples.SCORING_SECONDS.series == labels.TASK.count * (len(samples.SCORING_SECONDS.buckets) + 3)
    assert job.PHASE.series == len(PHASES)
    assert samples.WORKER_STATE.series == labels.WORKERS


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "iteration", "after rlhf_"),
        ("name", "rlhf_iteration_total", "_total"),
        ("kind", MetricKind.HISTOGRAM, "rising buckets"),
        ("meaning", "Iteration", "sentence"),
        ("normal", "", "normal"),
    ],
)
def test_a_metric_that_breaks_the_rules_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(job.ITERATION, **{field: value})


def test_a_unit_ends_the_name() -> None:
    with pytest.raises(ValueError, match="must name its unit, seconds"):
        replace(job.ITERATION_SECONDS, name="rlhf_duration")


def test_a_label_is_bounded() -> None:
    with pytest.raises(ValueError, match="give either its values"):
        Label("name", "of anything")


def test_the_page_is_what_the_catalogue_says() -> None:
    assert page.PATH.read_text() == page.text(), "run make metrics-page"


def test_no_name_of_a_metric_is_written_outside_the_catalogue() -> None:
    names = {name for metric in METRICS for name in (*metric.sample_names, metric.name.removesuffix("_total"))}
    catalogue = Path(page.__file__).parent
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent == catalogue:
                continue
            texts = (node.value for node in nodes(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            assert not names & {text for text in texts if isinstance(text, str)}, path
