"""The migration pool: in the status, as a label of its pods, as rate-limited events, as metrics."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_common import control_pb2 as pb
from rlhf_operator.coordinator_client import reading_of
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile import ObservedJob, ObservedPod, pod_of
from rlhf_operator.reconcile.job_status import TEXT_MAX

WORKING = {"generation": 4, "inference": 1, "training": 2}


def cluster() -> SimulatedCluster:
    simulated = SimulatedCluster(generation={"replicas": 4})
    simulated.settle()
    simulated.run()
    read(simulated)
    simulated.later(11)
    read(simulated)
    simulated.settle()
    return simulated


def read(cluster: SimulatedCluster, *pool: str, iteration: int = 3, **more: Any) -> None:
    cluster.read(iteration=iteration, working=WORKING, replicas=WORKING, pool=pool, **more)


def in_pool(cluster: SimulatedCluster) -> list[str]:
    return sorted(
        name.removeprefix("job-")
        for name, body in cluster.pods.items()
        if body["metadata"]["labels"].get("rlhf.dev/migration-pool") == "true"
    )


def pool(cluster: SimulatedCluster) -> dict[str, Any]:
    return dict(cluster.job["status"]["migrationPool"])


def test_a_pool_shows_in_the_status_and_on_its_pods_until_it_is_gone() -> None:
    job = cluster()
    job.later(11)
    read(job, "generation-0", threshold=12, released=3, fusion="12 samples on 1 worker", predicted_seconds=4.5678)
    job.settle()
    assert pool(job) | {"lastEventTime": ""} == {
        "replicas": 1,
        "generationReplicas": 4,
        "threshold": 12,
        "released": 3,
        "summary": "1/4",
        "workers": ["generation-0"],
        "lastEventTime": "",
    }
    assert in_pool(job) == ["generation-0"]
    assert job.events[-1] == "PoolFormed"
    assert job.job["status"]["plan"] == {"interStage": "12 samples on 1 worker", "predictedSeconds": 4.57}
    job.later(11)
    read(job, "generation-0", "generation-2")
    job.settle()
    assert in_pool(job) == ["generation-0", "generation-2"]
    job.later(61)
    read(job)
    job.settle()
    assert in_pool(job) == []
    assert pool(job)["summary"] == "0/4"
    assert job.events[-1] == "PoolDissolved"
    assert job.settle().idle


def test_labels_follow_no_faster_than_the_status() -> None:
    job = cluster()
    job.later(11)
    read(job, "generation-0")
    job.settle()
    job.later(2)
    read(job, "generation-1")
    plan = job.plan()
    assert plan.labels == ()
    assert plan.requeue_after is not None
    assert 0 < plan.requeue_after <= 8
    job.later(plan.requeue_after)
    job.settle()
    assert in_pool(job) == ["generation-1"]


def test_an_operator_that_dies_before_the_labels_sets_them_later() -> None:
    job = cluster()
    job.later(11)
    read(job, "generation-0")
    job.carry_out(job.plan(), only_status=True)
    assert in_pool(job) == []
    job.later(11)
    read(job, "generation-0")
    job.settle()
    assert in_pool(job) == ["generation-0"]


def test_a_pool_that_forms_in_every_short_iteration_is_told_once_a_minute() -> None:
    job = cluster()
    before = len(job.events)
    for iteration in range(4, 16):
        for members in (["generation-0"], []):
            job.later(10)
            read(job, *members, iteration=iteration)
            job.settle()
    events = [event for event in job.events[before:] if event.startswith("Pool")]
    assert 2 <= len(events) <= 5, "four minutes"
    assert job.condition("Resizing")["status"] == "False", "the pool is no resize"


def test_an_old_reading_says_nothing_about_labels() -> None:
    job = cluster()
    job.later(11)
    read(job, "generation-0")
    job.settle()
    job.later(120)
    job.settle()
    assert in_pool(job) == ["generation-0"]


def test_a_reading_takes_the_pool_the_choice_and_the_sessions_from_the_coordinator() -> None:
    workers = [
        pb.WorkerStatus(worker=f"generation-{index}", state=state)
        for index, state in enumerate(("Busy", "Ready", "Starting", "Missing", "Lost"))
    ]
    fusion = pb.FusionStatus(choice="12 on 1", threshold=12, pool=1, released=["generation-1"], predicted_seconds=2.5)
    status = pb.JobStatus(phase="Generating", workers=workers, pool=["generation-0"], fusion=fusion, long_rounds="none")
    reading = reading_of(status, SimulatedCluster().now)
    assert (reading.pool, reading.threshold, reading.released) == (("generation-0",), 12, 1)
    assert (reading.fusion, reading.predicted_seconds, reading.streams) == ("12 on 1", 2.5, 3)
    assert reading.long_rounds == "none"
    assert reading.working == {"generation": 2}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (["vllm: it is served"] * 2 + [""], "vllm: it is served"),
        (
            ["torch: not served", "vllm: it is served", "vllm: it is served"],
            "2 by vllm: it is served; 1 by torch: not served",
        ),
        ([f"engine-{number}: {'x' * 400}" for number in range(20)], None),
        ([""] * 3, ""),
    ],
)
def test_the_status_says_which_engine_workers_decode_by_and_why(said: list[str], shown: str | None) -> None:
    workers = [pb.WorkerStatus(worker=f"generation-{index}", engine=text) for index, text in enumerate(said)]
    job = cluster()
    job.later(11)
    read(job, engines=reading_of(pb.JobStatus(workers=workers), job.now).engines)
    job.settle()
    text = job.job["status"].get("plan", {}).get("engine", "")
    if shown is None:
        assert len(text) <= TEXT_MAX
        return
    assert text == shown
    job.later(11)
    read(job, fusion="no fusion")
    job.settle()
    assert job.job["status"]["plan"].get("engine", "") == text, "workers that start anew have not said yet"


def test_metrics_of_the_pool_come_and_go_with_the_job() -> None:
    job, metrics = cluster(), OperatorMetrics()

    def see() -> None:
        plan = job.plan()
        pods = (pod_of(body) for body in job.pods.values())
        readable = {pod.name: pod for pod in pods if isinstance(pod, ObservedPod)}
        observed = ObservedJob(pods=readable, reading=job.reading)
        metrics.see(job.job, observed, plan)
        job.carry_out(plan)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"namespace": "team", "rlhf_job": "job"} | labels)

    job.later(11)
    read(job, "generation-0", threshold=12, streams=7)
    see()
    assert value("rlhf_pool_replicas") == 1
    assert value("rlhf_pool_threshold") == 12
    assert value("rlhf_controlplane_streams") == 7
    assert value("rlhf_pool_desired_replicas", group="generation") == 4
    job.job["spec"]["generation"]["replicas"] = 3
    see()
    assert value("rlhf_pool_desired_replicas", group="generation") == 3
    job.finish_deletions()
    job.later(7)
    see()
    assert metrics.registry.get_sample_value("rlhf_pool_resize_duration_seconds_sum") == 7
    metrics.forget("team/job")
    assert value("rlhf_pool_replicas") is None
