"""The operator serves the metrics of the catalogue, for itself and for every job."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.observability.served_metrics import check_catalogue, never_absent, scraped, value
from tests.support.operator.simulated_cluster import START, SimulatedCluster

from rlhf_common.metrics.metric import Server
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile import CoordinatorReading, ObservedJob, ObservedPod, pod_of

JOB = {"namespace": "team", "rlhf_job": "job"}


GROUPS = ("generation", "training")


class WallClock:
    """Seconds since 1970, set by the test."""

    def __init__(self) -> None:
        self.now = START.timestamp()

    def __call__(self) -> float:
        return self.now


def conditions(reason: str, status: str = "False") -> dict[str, Any]:
    moment = START.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "Running", "status": status, "reason": reason, "message": "", "lastTransitionTime": moment}


def see(metrics: OperatorMetrics, cluster: SimulatedCluster, status: dict[str, Any]) -> None:
    """Show the operator a job with this status."""
    pods = {pod.name: pod for body in cluster.pods.values() if isinstance(pod := pod_of(body), ObservedPod)}
    observed = ObservedJob(pods=pods, reading=CoordinatorReading(cluster.now, "Generating", 3, 10, threshold=4))
    metrics.see(cluster.job, observed, replace(cluster.plan(), status=status))


def status(reason: str, **more: Any) -> dict[str, Any]:
    generation = {"name": "generation", "desired": 2, "ready": 0, "outOfMemory": 3}
    groups = [generation, {"name": "training", "desired": 2, "ready": 0}]
    return {"conditions": [conditions(reason)], "groups": groups, "algorithm": "ppo", **more}


def test_the_operator_serves_the_catalogue() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    cluster.job["metadata"]["creationTimestamp"] = "2026-08-22T10:00:00Z"
    see(metrics, cluster, status("Running", progress={"iteration": 3, "iterations": 10}))
    metrics.errors.labels("Bug").inc()
    metrics.answered("get", "pods", 200)
    metrics.reconciles.labels("ok").observe(0.1)
    check_catalogue(metrics.registry, Server.OPERATOR)
    never_absent(metrics.registry, Server.OPERATOR)
    assert value(metrics.registry, "rlhf_job_iteration", **JOB) == 3
    assert value(metrics.registry, "rlhf_job_restarts_total", **JOB) == 0
    kills = {
        group: value(metrics.registry, "rlhf_job_out_of_memory_kills_total", **JOB, group=group) for group in GROUPS
    }
    assert kills == {"generation": 3, "training": 0}


def test_a_job_that_waits_says_for_what_and_since_when_until_it_runs() -> None:
    clock = WallClock()
    metrics, cluster = OperatorMetrics(clock), SimulatedCluster()
    see(metrics, cluster, status("Queued"))
    clock.now += 100
    see(metrics, cluster, status("Queued"))
    since = "rlhf_job_waiting_since_timestamp_seconds"
    assert value(metrics.registry, since, reason="Queued", **JOB) == clock.now - 100
    see(metrics, cluster, status("Starting"))
    assert value(metrics.registry, since, **JOB) == clock.now
    assert value(metrics.registry, "rlhf_job_phase", phase="Starting") == 1
    see(metrics, cluster, status("Running"))
    names = {sample.name for sample in scraped(metrics.registry)}
    assert since not in names
    assert [s.labels["phase"] for s in scraped(metrics.registry) if s.name == "rlhf_job_phase"] == ["Running"]


def test_a_job_whose_pods_cannot_start_waits_since_its_first_try_until_a_queue_or_a_run() -> None:
    """Its clock once started anew at each release, so that a missing image raised no alert for hours."""
    clock = WallClock()
    metrics, cluster = OperatorMetrics(clock), SimulatedCluster()
    first, since = clock.now, "rlhf_job_waiting_since_timestamp_seconds"
    for reason in ("Pending", "Starting", "Released", "Starting", "Released"):
        see(metrics, cluster, status(reason))
        assert value(metrics.registry, since, reason=reason, **JOB) == first
        assert value(metrics.registry, "rlhf_job_phase_since_timestamp_seconds", **JOB) == clock.now
        clock.now += 600
    for reason in ("Queued", "Starting", "Unschedulable", "Starting"):
        see(metrics, cluster, status(reason))
        assert value(metrics.registry, since, reason=reason, **JOB) == clock.now
        clock.now += 600


def test_a_job_that_ran_before_this_process_is_in_its_phase_since_it_ran() -> None:
    clock = WallClock()
    clock.now += timedelta(hours=5).total_seconds()
    metrics, cluster = OperatorMetrics(clock), SimulatedCluster()
    see(metrics, cluster, {"conditions": [conditions("Running", "True")]})
    assert value(metrics.registry, "rlhf_job_phase_since_timestamp_seconds", **JOB) == START.timestamp()


def test_gpus_are_those_that_pods_hold() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    cluster.job["spec"]["generation"]["gpusPerReplica"] = 4
    see(metrics, cluster, status("Queued"))
    assert value(metrics.registry, "rlhf_job_gpus_requested", **JOB) == 8
    assert value(metrics.registry, "rlhf_job_gpus_held", **JOB) == 0


def test_a_status_that_somebody_wrote_by_hand_breaks_no_scrape() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    broken = {"conditions": [conditions("Fancy")], "groups": [{"name": "other", "desired": "many"}]}
    see(metrics, cluster, broken | {"progress": {"iteration": None}, "restarts": {"failures": "x"}})
    check_catalogue(metrics.registry, Server.OPERATOR)
    assert value(metrics.registry, "rlhf_job_restarts_total", **JOB) == 0


def test_the_series_of_a_job_go_with_it() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    see(metrics, cluster, status("Running"))
    metrics.forget("team/job")
    assert not [sample for sample in scraped(metrics.registry) if "rlhf_job" in sample.labels]


def test_the_time_to_running_is_counted_once_and_although_progress_is_known_while_a_job_starts() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    cluster.job["metadata"]["creationTimestamp"] = (START - timedelta(seconds=40)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def runs(progress: int) -> None:
        starting = {"progress": {"iteration": progress, "iterations": 10}}
        cluster.job["status"] = status("Starting", **starting)
        see(metrics, cluster, status("Running", **starting) | {"conditions": [conditions("Running", "True")]})

    runs(0)
    assert metrics.registry.get_sample_value("rlhf_job_created_to_ready_seconds_sum") == 40
    runs(3)
    assert metrics.registry.get_sample_value("rlhf_job_created_to_ready_seconds_count") == 1


def test_the_page_says_what_the_client_of_prometheus_would() -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster()
    cluster.job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": 'a "b" \\ c\nd'}
    see(metrics, cluster, status("Queued", progress={"iteration": 3, "iterations": 10}))
    metrics.answered("get", "pods", 200)
    written = {
        (sample.name, *sorted(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
        if not sample.name.startswith("process_")
    }
    expected = {
        (sample.name, *sorted(sample.labels.items()), sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.startswith("process_")
    }
    assert written == expected


@pytest.mark.parametrize(
    ("reason", "resizes"),
    [
        ("Running", 1),
        ("Recovering", 1),
        ("Suspended", 0),
        ("Complete", 0),
        ("Failed", 0),
        ("Released", 0),
        ("Starting", 0),
    ],
)
def test_a_resize_is_measured_if_the_job_goes_on_after_it(reason: str, resizes: int) -> None:
    metrics, cluster = OperatorMetrics(), SimulatedCluster().begin()

    def during(reason: str, resizing: str, at: datetime) -> dict[str, Any]:
        moment = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = conditions(reason) | {"type": "Resizing", "status": resizing, "lastTransitionTime": moment}
        return {"conditions": [conditions(reason), condition]}

    cluster.job["status"] = during("Running", "True", START)
    see(metrics, cluster, during(reason, "False", START + timedelta(seconds=7)))
    assert value(metrics.registry, "rlhf_pool_resize_duration_seconds_count") == resizes
    assert value(metrics.registry, "rlhf_pool_resize_duration_seconds_sum") == 7 * resizes
