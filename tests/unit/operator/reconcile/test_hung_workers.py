"""Workers that hang or are cut off while their pods look healthy: the coordinator loses them; they are replaced."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_common import control_pb2 as pb
from rlhf_operator.coordinator_client import reading_of

EVERYBODY = ("generation-0", "generation-1", "inference-0", "training-0", "training-1")


def begun(**policy: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(runPolicy={"backoffLimit": 2, **policy}).begin()
    cluster.later(600)
    return cluster


def silence(
    cluster: SimulatedCluster, workers: Sequence[str], seconds: float, registered: Sequence[str] = EVERYBODY
) -> None:
    """Make the coordinator report that it has not heard from `workers` for this long."""
    heard = [item for item in registered if item not in workers]
    silent = {worker: cluster.now - timedelta(seconds=seconds) for worker in workers}
    cluster.read(silent=silent, streams=len(heard))


def test_a_worker_that_is_lost_while_its_pod_is_ready_is_replaced_and_counted() -> None:
    cluster = begun()
    silence(cluster, ["generation-1"], 40)
    cluster.settle()
    assert not cluster.deleting
    message = "the coordinator has lost job-generation-1, whose pod is ready: it is replaced after 90 s"
    assert message in cluster.running_message

    cluster.later(51)
    silence(cluster, ["generation-1"], 91)
    cluster.settle()
    assert cluster.deleting == {"job-generation-1": 30}
    restarts = cluster.job["status"]["restarts"]
    assert restarts["failures"] == 1
    assert restarts["lastReason"] == (
        "job-generation-1: lost: no heartbeat reached its coordinator for 91 s, though it runs"
    )
    assert "WorkerFailed" in cluster.events

    cluster.finish_deletions()
    cluster.settle()
    cluster.run()
    cluster.later(5)
    silence(cluster, ["generation-1"], 100)  # the new one loads
    cluster.settle()
    cluster.later(200)
    silence(cluster, ["generation-1"], 300)
    assert cluster.settle().idle
    assert not cluster.deleting
    assert cluster.job["status"]["restarts"]["failures"] == 1


def test_when_more_than_half_are_lost_at_once_it_is_the_coordinator_and_nobody_is_replaced() -> None:
    cluster = begun()
    silence(cluster, EVERYBODY[:3], 500)
    cluster.settle()
    assert not cluster.deleting
    assert "the coordinator has lost 3 of 5 workers at once, so its own network is more likely cut" in (
        cluster.running_message
    )
    assert cluster.job["status"]["restarts"]["failures"] == 0


def test_a_single_worker_that_is_lost_may_be_the_coordinators_trouble() -> None:
    cluster = begun()
    silence(cluster, ["training-0"], 500, registered=["training-0"])
    cluster.settle()
    assert not cluster.deleting


def test_those_that_are_lost_together_are_one_failure() -> None:
    cluster = begun()
    silence(cluster, ["generation-0", "training-1"], 91)
    cluster.settle()
    assert cluster.deleting.keys() == {"job-generation-0", "job-training-1"}
    restarts = cluster.job["status"]["restarts"]
    assert (restarts["failures"], restarts["disruptions"]) == (1, 1)


def test_more_of_them_than_are_forgiven_fail_the_job() -> None:
    cluster = begun(backoffLimit=0)
    silence(cluster, ["inference-0"], 91)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "BackoffLimitExceeded"
    assert "no heartbeat reached its coordinator for 91 s" in cluster.condition("Failed")["message"]


def test_a_coordinator_that_cannot_be_read_loses_nobody() -> None:
    cluster = begun()
    silence(cluster, ["generation-1"], 80)
    cluster.later(31)
    cluster.settle()
    assert not cluster.deleting


def test_a_pod_that_is_not_well_is_somebody_elses_to_end() -> None:
    cluster = begun()
    conditions = cluster.pods["job-generation-1"]["status"]["conditions"]
    conditions[:] = [{"type": "Ready", "status": "False"}]  # its node is lost
    silence(cluster, ["generation-1"], 500)
    cluster.settle()
    assert not cluster.deleting


def test_a_process_that_started_after_the_lost_one_has_to_load_first() -> None:
    cluster = begun()
    cluster.end("generation-1", 1)
    cluster.settle()
    cluster.later(120)
    silence(cluster, ["generation-1"], 121)
    cluster.settle()
    assert not cluster.deleting


def test_a_longer_time_out_of_the_manifest_is_kept() -> None:
    cluster = begun(workerTimeoutSeconds=300)
    silence(cluster, ["generation-1"], 359)
    cluster.settle()
    assert not cluster.deleting
    cluster.later(2)
    silence(cluster, ["generation-1"], 361)
    cluster.settle()
    assert cluster.deleting.keys() == {"job-generation-1"}


def test_nobody_is_replaced_in_a_job_whose_pods_cannot_be_made() -> None:
    cluster = begun()
    cluster.job["spec"]["generation"]["template"] = {"spec": {"hostNetwork": True}}
    silence(cluster, ["generation-1"], 500)
    cluster.settle()
    assert not cluster.deleting


def test_a_reply_names_the_silent_and_one_of_an_earlier_version_or_nonsense_names_nobody() -> None:
    now = SimulatedCluster().now
    status = pb.JobStatus(
        workers=[
            pb.WorkerStatus(worker="generation-0", state="Lost", silent_seconds=40.5),
            pb.WorkerStatus(worker="generation-1", state="Lost"),
            pb.WorkerStatus(worker="generation-2", state="Ready", silent_seconds=5),
            *(
                pb.WorkerStatus(worker="generation-3", state="Lost", silent_seconds=seconds)
                for seconds in (float("nan"), float("inf"), -1.0, 1e300)
            ),
        ]
    )
    assert reading_of(status, now).silent == {"generation-0": now - timedelta(seconds=40.5)}


EIGHT = tuple(f"training-{rank}" for rank in range(8))
OTHERS = ("generation-0", "generation-1", "inference-0")


def pods_of_ranks() -> SimulatedCluster:
    training = {"parallelism": {"pipeline": 4, "data": 2}, "ranksPerPod": 4, "microBatchSize": 4}
    cluster = SimulatedCluster(runPolicy={"backoffLimit": 2}, training=training).begin()
    cluster.later(600)
    return cluster


def test_the_pod_of_a_lost_rank_is_replaced_whichever_rank_of_it_that_is() -> None:
    cluster = pods_of_ranks()
    silence(cluster, ["training-6"], 91, (*OTHERS, *EIGHT))
    cluster.settle()
    assert "job-training-1" in cluster.deleting
    assert "job-training-1: lost" in cluster.job["status"]["restarts"]["lastReason"]


def test_ranks_that_are_lost_with_their_pod_are_one_lost_pod_and_not_the_coordinators_network() -> None:
    cluster = pods_of_ranks()
    silence(cluster, EIGHT[:4], 91, (*OTHERS[:2], *EIGHT[:4]))
    cluster.settle()
    assert "job-training-0" in cluster.deleting


def test_a_coordinator_that_hears_of_one_full_pod_alone_is_cut_off() -> None:
    cluster = pods_of_ranks()
    silence(cluster, [*OTHERS, *EIGHT[:4]], 91, (*OTHERS, *EIGHT))
    cluster.settle()
    assert not cluster.deleting
