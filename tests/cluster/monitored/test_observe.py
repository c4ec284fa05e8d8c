"""Observes a real job: every panel of every dashboard has data, and no series is missing, duplicated or unknown.

Rule: the queries come from the objects that the chart created, and every query is waited for separately. A query that
has data only in a rare state is listed in `RARE` with the reason, and that list is checked too.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.jobs_in_pods.gated_job import NAME
from tests.cluster.monitored.observed import NAMESPACE, Observed
from tests.cluster.monitored.page import PageSeen
from tests.cluster.processes import wait_until
from tests.support.observability.browser import Browser
from tests.support.observability.dashboard_queries import Asked, queries
from tests.support.observability.served_metrics import metric_of_series

from rlhf_common.metrics.catalogue import METRICS
from rlhf_common.metrics.metric import Server

pytestmark = pytest.mark.full


PATIENCE = 600.0  # seconds for any one fact
WHOLE_SECONDS = 1800
"""Seconds of the whole period, from before the job's first iteration on, so that one-time events are included."""
INTERVAL = 2  # seconds between two scrapes
DRAWN_SCRAPES = 30
"""Scrapes of short-lived data: a small panel draws the whole time in steps of many seconds."""
RATE_INTERVAL = "20s"  # several scrapes of a machine that is busy
RUN_PAGE_PORT = 8  # port of the slot, by index
SETTLED = 6
"""Iterations that the job has trained before the check, with a checkpoint and a recovery."""
SCRAPE_LABELS = {"__name__", "instance", "job", "namespace", "pod", "rlhf_job"}
PROCESSES = 9
"""Number of processes: the operator, the coordinators of both jobs, two workers each of generation, inference,
training.
"""
TAUGHT = "ranks that teach a draft model; tests/integration/jobs/test_trained_drafter.py reads what they measure"
VLLM = "workers whose engine is vLLM; tests/integration/vllm/test_vllm_roles.py asks the endpoint of one"
CARRIED = "jobs with rollout.maxStaleness; tests/integration/jobs/test_carried_job.py reads what they measure"
BEHIND = "jobs with training.criticOverlap; tests/integration/jobs/test_critic_overlap.py reads what they measure"
BESIDE = "jobs with rollout.overlapTraining; tests/integration/jobs/test_rollout_overlap.py reads what they measure"
SHARED = "jobs with training.sharedPrompts; tests/integration/jobs/test_shared_prompts_job.py reads what they measure"
STREAMED = "jobs with training.stream; tests/integration/jobs/test_streamed_job.py reads what they measure"
AHEAD = "jobs that draft ahead; tests/integration/jobs/test_drafting_ahead_job.py reads what they measure"
OFFLOADED = (
    "jobs with parallelism.offloadOptimizer; tests/integration/jobs/test_killed_ranks.py reads what they measure"
)
EXPERTS = "models of experts; tests/integration/jobs/test_expert_job.py reads what their ranks say"
RARE = {
    ("engine", "Fullest devices and caches", "A"): "workers that compute on GPUs, whose memory the driver tells",
    ("engine", "Fullest devices and caches", "B"): VLLM,
    ("engine", "Decoded and prefilled", "C"): VLLM,
    ("engine", "Most samples", "C"): VLLM,
    ("engine", "Returned and failed samples", "D"): VLLM,
    ("training", "Time of a step, against its prediction", "D"): BEHIND,
    ("training", "Bubbles against their prediction, and padding", "C"): BEHIND,
    ("training", "Bubbles against their prediction, and padding", "D"): SHARED,
    ("training", "Time of a step, against its prediction", "E"): BESIDE,
    ("training", "Time of a step, against its prediction", "F"): STREAMED,
    ("speculation", "Tokens decoded ahead", "A"): AHEAD,
    ("speculation", "Tokens decoded ahead", "B"): AHEAD,
    ("speculation", "Tokens decoded ahead", "C"): AHEAD,
    ("speculation", "Workers that decode ahead", "A"): AHEAD,
    ("workers", "Most memory", "B"): OFFLOADED,
    ("training", "Use of experts", "A"): EXPERTS,
    ("training", "Use of experts", "B"): EXPERTS,
    ("training", "Draft model against the policy", "A"): TAUGHT,
    ("training", "Draft model against the policy", "B"): TAUGHT,
    ("learning", "Samples left out of training", "D"): CARRIED,
    (
        "engine",
        "Scoring caches, and memory freed by sleep",
        "A",
    ): "scoring early, which Auto chooses by a measured gain",
}
"""(dashboard, panel, query) -> the kind of job that has data for it, unlike a job on this machine."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Yield a job that has trained some iterations and lost a worker meanwhile."""
    with Observed(tmp_path_factory.mktemp("observed"), interval=f"{INTERVAL}s") as result:
        result.until_trained(2)
        # Times are predicted under Auto only, which ends with the change.
        seen = f"count_over_time(rlhf_fusion_prediction_error_ratio[{WHOLE_SECONDS}s])"
        result.monitoring.prometheus.until(
            seen,
            PATIENCE,
            lambda found: any(each.value >= DRAWN_SCRAPES for each in found),
            "as much of it as is drawn",
        )
        result.change()
        result.lose("generation-1")
        result.until_trained(SETTLED)
        yield result


def asked(observed: Observed) -> list[Asked]:
    """Return all queries of all dashboards."""
    paths = sorted((observed.folder / "dashboards").glob("*.json"))
    return [item for path in paths for item in queries(path, rate_interval=RATE_INTERVAL, whole_range="15m")]


def test_every_query_of_every_panel_has_data(observed: Observed) -> None:
    without = {(item.dashboard, item.panel, item.query): item for item in asked(observed)}
    assert not RARE.keys() - without.keys()
    start = time.time() - WHOLE_SECONDS

    def all_have() -> bool:
        for key, item in list(without.items()):
            found = observed.monitoring.prometheus.query_range(item.expression, start, time.time(), INTERVAL)
            if any(not math.isnan(value) for series in found for _, value in series.samples):
                del without[key]
        return without.keys() <= RARE.keys()

    try:
        wait_until("data of every query", all_have, PATIENCE, every=INTERVAL, check=observed.cluster.check)
    except TimeoutError as error:
        missing = [f"{key}: {item.expression}" for key, item in without.items() if key not in RARE]
        raise AssertionError("no data of\n" + "\n".join(missing)) from error


def test_the_catalogue_is_what_is_served(observed: Observed) -> None:
    prometheus = observed.monitoring.prometheus
    always = {name for metric in METRICS if not metric.absent and not metric.labels for name in metric.sample_names}
    always = {name for name in always if name.startswith("rlhf_")}

    def missing() -> set[str]:
        return always - {labels["__name__"] for labels in prometheus.series('{__name__=~"rlhf_.+"}')}

    try:
        wait_until("every series of the catalogue", lambda: not missing(), PATIENCE, every=INTERVAL)
    except TimeoutError as error:
        raise AssertionError(f"nobody serves {sorted(missing())}") from error
    for labels in prometheus.series('{__name__=~"rlhf_[^:]+"}'):  # without recorded series
        metric = metric_of_series(labels["__name__"])
        assert metric is not None, f"{labels['__name__']} is not in the catalogue"
        own = {*metric.label_names, "le"}
        assert labels.keys() <= SCRAPE_LABELS | own, f"{labels}: {metric.name} has {metric.label_names}"
        if Server.OPERATOR not in metric.servers:
            assert labels["namespace"] == NAMESPACE, labels
            assert labels["rlhf_job"] in ("tiny", "waiting"), labels


def test_no_series_is_scraped_twice_and_no_scrape_fails(observed: Observed) -> None:
    prometheus = observed.monitoring.prometheus
    addresses = Counter(target["scrapeUrl"] for target in prometheus.targets())
    assert {address: count for address, count in addresses.items() if count > 1} == {}
    # Every process of the jobs and the operator.
    prometheus.until("count(up == 1)", PATIENCE, lambda found: found and found[0].value == PROCESSES)
    prometheus.until("up == 0", PATIENCE, lambda found: not found)
    live = 'count by (__name__, pod, job) ({__name__=~"rlhf_build_info|process_start_time_seconds"})'
    # A replaced container exists twice until Prometheus has discovered the targets again.
    prometheus.until(
        live, PATIENCE, lambda found: {item.value for item in found} == {1.0}, "each process to be there once"
    )


def test_the_rules_are_evaluated_and_only_what_is_wrong_fires(observed: Observed) -> None:
    wrong: list[dict[str, Any]] = []

    def evaluated() -> bool:
        """Return whether all were evaluated; one without an evaluation has no health."""
        rules = observed.monitoring.prometheus.rules()
        wrong[:] = [rule for rule in rules if rule["health"] != "ok"]
        return bool(rules) and not wrong

    try:
        wait_until("every rule to be evaluated", evaluated, PATIENCE, every=INTERVAL)
    except TimeoutError as error:
        raise AssertionError(f"rules that cannot be evaluated: {wrong}") from error
    firing = {alert["labels"]["alertname"] for alert in observed.monitoring.prometheus.alerts()}
    assert "RLHFOperatorNotLeading" not in firing


def test_grafanas_libraries_draw_every_panel(observed: Observed, tmp_path: Path) -> None:
    parameters = {"from": f"now-{WHOLE_SECONDS}s", "scrape": str(INTERVAL)}
    pages: list[PageSeen] = observed.server.draw(observed.dashboards, tmp_path, parameters)
    assert [page.problems for page in pages if page.problems] == []
    rare = {(dashboard, panel) for dashboard, panel, _ in RARE}
    wrong = [
        (page.dashboard, panel.title, panel.state, panel.words)
        for page in pages
        for panel in page.panels
        if panel.state != "data" and not (panel.state == "nothing" and (page.dashboard, panel.title) in rare)
    ]
    assert wrong == []


def test_the_page_of_a_job_that_runs_is_seen_in_a_browser(observed: Observed) -> None:
    """Follow docs/how-to/look-at-one-run.md: served in the coordinator's pod, viewed through a forwarded port."""
    port, place = observed.cluster.port(RUN_PAGE_PORT), f"--namespace={NAMESPACE}"
    program = ("python", "-m", "rlhf_coordinator.run_page", f"--port={port}")
    commands = (
        ("exec", place, f"{NAME}-coordinator", "--", *program),
        ("port-forward", place, f"pod/{NAME}-coordinator", str(port)),
    )
    with ExitStack() as steps:
        said = [observed.cluster.following(steps, *command) for command in commands]
        wait_until("the port to be forwarded", lambda: "Forwarding from" in said[1].read_text(), PATIENCE)
        wait_until("the address of the page", lambda: "is shown at" in said[0].read_text(), PATIENCE)
        browser = steps.enter_context(Browser())
        browser.do("open", url=said[0].read_text().split(" is shown at ")[1].split()[0])
        browser.do("until", script="document.querySelectorAll('#iterations tbody tr').length > 1")
        browser.do("until", script="document.getElementById('state').textContent === 'live'")
        newest = "Number(document.querySelector('#iterations tbody tr').dataset.iteration)"
        seen = browser.do("run", script=newest)
        browser.do("until", script=f"{newest} > {seen}")
