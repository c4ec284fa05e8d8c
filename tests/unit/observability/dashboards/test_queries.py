"""Every query of every panel has existing series and labels, and the panel's unit."""

import re
from collections.abc import Iterator

import promql_parser as promql
import pytest
from tests.support.observability.promql_reading import OVER_TIME, Dimension, Reader

from rlhf_common.metrics.catalogue import BY_NAME, METRICS
from rlhf_common.metrics.metric import Metric, MetricKind, Server
from rlhf_observability.dashboards import all_dashboards
from rlhf_observability.dashboards.annotations import annotations
from rlhf_observability.dashboards.panels import MAX_SERIES, Dashboard, Panel, PanelKind, PanelUnit, Query, Variable
from rlhf_observability.dashboards.variables import ALL, QUERIES

READER = Reader(BY_NAME)
UNITS: dict[str, Dimension] = {
    PanelUnit.SECONDS: (("s", 1),),
    PanelUnit.BYTES: (("bytes", 1),),
    PanelUnit.BYTES_PER_SECOND: (("bytes", 1), ("s", -1)),
    PanelUnit.TOKENS: (("tokens", 1),),
    PanelUnit.TOKENS_PER_SECOND: (("s", -1), ("tokens", 1)),
    PanelUnit.SAMPLES: (("samples", 1),),
    PanelUnit.SHARE: (),
    PanelUnit.NUMBER: (),
    PanelUnit.NATS: (("nats", 1),),
    PanelUnit.REWARD: (("reward", 1),),
    PanelUnit.PER_SECOND: (("s", -1),),
}

NOT_SHOWN = {
    "rlhf_evaluation_waited_seconds": "nearly always 0; the iteration's line of metrics.jsonl has it",
    "rlhf_draft_model_agreement_ratio": "the difference from the policy is shown, and tells it more finely",
    "rlhf_draft_model_step_seconds": "the timeline has every one as train/draft; this one is for jobs without it",
    "rlhf_draft_model_skipped_steps": "the rank's log says each; the difference from the policy shows what came of it",
    "rlhf_draft_model_published_bytes": "a constant of the job",
    "rlhf_engine_passes_total": "steps are shown, which have one pass each but in deterministic jobs",
    "rlhf_training_micro_batches": "padding is shown; this one says what a bound of tokens made of a mini-batch",
    "rlhf_training_stream_microbatches": "the seconds of these micro-batches are shown",
    "rlhf_training_largest_micro_batch_tokens": "padding is shown; this one is looked up to choose a bound of tokens",
    "rlhf_engine_graph_passes_total": "the time of a step is shown; this one says why it is long on a GPU",
    "rlhf_engine_fused_passes_total": "all passes or none: what was chosen when the worker started",
    "rlhf_engine_capture_seconds_total": "as rlhf_engine_graph_passes_total",
    "rlhf_worker_engine": "for queries of one's own: joined to any series it says which engine it is of",
    "rlhf_engine_running_samples": "held samples and those that wait are shown; this is what is left of them",
    "rlhf_engine_prefix_tokens_total": "tokens that were found and that were prefilled are shown; these are both",
    "rlhf_engine_sleeps_total": "the bytes are shown that sleeps gave back",
    "rlhf_job_condition": "phases say the same at a glance, and `rlhf describe` says it in words",
    "rlhf_job_created_timestamp_seconds": "the age of a job is in `rlhf get`; waits are counted from the phase",
    "rlhf_job_group_pods": "GPUs held and sessions say who is there; `kubectl get pods` says the rest",
    "rlhf_job_out_of_memory_kills_total": "ends of pods are shown, and `rlhf describe` says of each how it came",
    "rlhf_trackers_lost_total": "the event TrackerLost and the message of Running say which, and why",
    "rlhf_tracker_behind_iterations": "for an alert of one's own; one that falls far behind is given up, which is told",
    "rlhf_trace_spans_total": "what does not arrive is said in the log, and no job depends on it",
    "rlhf_pool_replicas": "the coordinator's own number is shown; this one is for clusters that scrape operators alone",
    "rlhf_pool_threshold": "as rlhf_pool_replicas",
    "rlhf_pool_desired_replicas": "as rlhf_pool_replicas",
    "rlhf_controlplane_streams": "as rlhf_pool_replicas",
    "rlhf_started_timestamp_seconds": "for queries of one's own: the age of a job",
    "rlhf_phase_since_timestamp_seconds": "the line of phases shows it, and an alert watches it",
    "rlhf_phase_seconds_total": "stages are shown, which add up to an iteration",
    "rlhf_stage_seconds_total": "the stages of the last iteration are shown; this one is for rates over days",
    "rlhf_iteration_samples_per_second": "the batch over the time of an iteration, which is shown",
    "rlhf_cut_tokens": "a job without rollout.oversample has none; metrics.jsonl has them for each iteration",
    "rlhf_long_round": "follows from the number of the iteration; rlhf run shows it with each",
    "rlhf_surplus_prompts": "changes once a period at most; an event says why, and rlhf run shows it",
    "rlhf_cut_draft_tokens": "a store of hints; the panels of speculation show what drafts give",
    "rlhf_sorted_batch": "1 after the first epoch; rlhf run shows it with each iteration",
    "rlhf_expected_response_tokens": "its observed counterpart rlhf_response_tokens_mean is on a dashboard",
    "rlhf_waiting_prompts": "follows from the number of the iteration; rlhf run shows it with each",
    "rlhf_carried_samples": "a constant of the job, less those that are begun anew, which are shown",
    "rlhf_carried_tokens": "what the job would lose otherwise; its lengths are shown",
    "rlhf_staleness_mean": "clipped tokens are shown, which it does its harm by",
    "rlhf_staleness_max": "bounded by the manifest",
    "process_virtual_memory_bytes": "of no meaning by itself",
    "process_start_time_seconds": "restarts are counted and marked",
}
"""Metric -> reason why no dashboard shows it."""


def queries() -> Iterator[tuple[Dashboard, Panel, Query]]:
    for dashboard in all_dashboards():
        for panel in dashboard.panels:
            for query in panel.queries:
                yield dashboard, panel, query


CASES = [
    pytest.param(*case, id=f"{case[0].uid}-{case[1].title}-{index}".replace(" ", "_"))
    for index, case in enumerate(queries())
]


@pytest.mark.parametrize(("dashboard", "panel", "query"), CASES)
def test_a_query_names_series_that_are_served_and_answers_in_the_unit_of_its_panel(
    dashboard: Dashboard, panel: Panel, query: Query
) -> None:
    reading = READER.read(query.expression)
    missing = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - reading.labels
    assert missing == set(), "the legend names labels that the answer has not"
    if panel.kind is PanelKind.HEATMAP:
        assert "le" in reading.labels
    elif panel.kind is not PanelKind.TABLE:
        assert reading.dimension == UNITS[panel.unit]
        assert bool(query.legend) == bool(reading.labels) or len(panel.queries) > 1, "several series need a name each"
    for selected in READER.selected(query.expression):
        if selected.metric.kind is MetricKind.COUNTER and panel.kind is not PanelKind.TABLE:
            assert selected.function in OVER_TIME, f"{selected.name} is a counter"
        if selected.name.endswith(("_bucket", "_sum", "_count")) and selected.metric.kind is MetricKind.HISTOGRAM:
            assert selected.function in OVER_TIME
        if selected.metric.kind is MetricKind.GAUGE:
            assert selected.function not in OVER_TIME, f"{selected.name} is no counter"


@pytest.mark.parametrize(("dashboard", "panel", "query"), CASES)
def test_a_query_asks_for_what_was_chosen_above_it_and_for_no_more_series_than_a_person_reads(
    dashboard: Dashboard, panel: Panel, query: Query
) -> None:
    used = {name for name in re.findall(r"\$(\w+)", query.expression) if not name.startswith("__")}
    assert used <= {variable.value for variable in dashboard.variables}
    for selected in READER.selected(query.expression):
        wanted = {variable.value for variable in dashboard.variables} & {"cluster", "namespace", "job"}
        of_jobs = selected.metric.servers != (Server.OPERATOR,) or "rlhf_job" in selected.metric.label_names
        if selected.matchers.get("rlhf_job") == "" or not of_jobs:
            wanted = {"cluster"}
        narrowed_by = {value.removeprefix("$") for value in selected.matchers.values() if value.startswith("$")}
        assert wanted <= narrowed_by, f"{selected.name} is not narrowed by {wanted - narrowed_by}"
    labels = READER.read(query.asked).labels
    if panel.kind is not PanelKind.TABLE and labels & {"worker", "pod", "rlhf_job"} and wanted != {"cluster"}:
        [bound] = re.findall(r"^(?:top|bottom)k\((\d+), ", query.asked) or [None]
        assert bound, "a series a worker, or a job, is a thousand series"
        assert int(bound) <= (10 if "worker" in labels else MAX_SERIES)


def test_every_metric_is_on_a_dashboard_or_says_why_not() -> None:
    marked = [annotation.expression for dashboard in all_dashboards() for annotation in dashboard.annotations]
    expressions = [*marked, *(query.expression for _, _, query in queries())]
    shown = {selected.metric.name for expression in expressions for selected in READER.selected(expression)}
    current = {metric.name for metric in METRICS}
    assert current - shown - set(NOT_SHOWN) == set()
    assert {name for name in NOT_SHOWN if name in shown or name not in current} == set()


def test_annotations_are_read_like_queries_and_alerts_are_marked() -> None:
    for dashboard in all_dashboards():
        *own, alerts = annotations(dashboard)
        assert str(promql.parse(alerts.expression)).startswith("ALERTS{")
        for annotation in own:
            assert set(re.findall(r"\{\{(\w+)\}\}", annotation.title)) <= READER.read(annotation.expression).labels


def test_variables_choose_from_labels_that_their_metric_has() -> None:
    for variable, query in QUERIES.items():
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        declared: Metric = BY_NAME[metric]
        assert label in (*declared.label_names, "cluster"), variable
    assert re.fullmatch(ALL[Variable.CLUSTER], ""), "where one Prometheus has one cluster there is no such label"
    assert not re.fullmatch(ALL[Variable.JOB], ""), "the operator's own series are of no job"
