"""A job whose ranks share one pod of a real node: one is killed, the container restarts, and the job completes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.jobs_in_pods.gated_job import NAME, OPEN, GatedJob, scraped, total
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.full


PATIENCE = 600.0  # seconds for any one fact
ITERATIONS = 4
KILL = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    variables = (entry / "environ").read_bytes().split(b"\\0")
    if b"RLHF_INDEX=1" in variables and b"RLHF_GROUP=training" in variables:
        os.kill(int(entry.name), signal.SIGKILL)
        print("killed", entry.name)
"""


def test_a_killed_rank_restarts_its_pod_and_the_job_goes_on(
    node_cluster: Cluster, operator: OperatorProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    job = GatedJob(node_cluster, "ranks-in-one-pod", folder, forgiven=3, iterations=ITERATIONS, every=2)
    job.manifest["spec"]["training"]["ranksPerPod"] = 2
    job.apply()

    def until(event: str, holds: object) -> None:
        wait_until(event, holds, PATIENCE, check=operator.check, every=0.5)  # type: ignore[arg-type]

    job.allow(2)
    until("two iterations to be trained", lambda: job.trained() >= 2)
    assert not job.pod("training-1"), "both ranks are in training-0"
    address = str(job.pod("training-0")["status"]["podIP"])
    connected = scraped(address)
    assert [total(connected, "rlhf_worker_connected", worker=f"training-{rank}") for rank in range(2)] == [1, 1]
    assert total(connected, "process_resident_memory_bytes", worker="training-1") > 0
    before = job.container("training-0")

    assert "killed" in node_cluster.kubectl("exec", f"{NAME}-training-0", job.where, "--", "python", "-c", KILL)
    until("the container to be another", lambda: job.container("training-0") not in ("", before))
    [status] = job.pod("training-0")["status"]["containerStatuses"]
    ended = status["lastState"]["terminated"]
    assert ended["exitCode"] == 137
    assert "training-1 ended with signal 9" in ended["message"].splitlines()[-1]
    until("the end of the rank to be counted", lambda: job.restarts()[0] == 1)
    assert "training-1 ended with signal 9" in job.seen()["status"]["restarts"]["lastReason"]

    job.allow(OPEN)
    until("the job to complete", lambda: job.condition("Complete").get("status") == "True")
    assert job.trained() == ITERATIONS
    assert job.restarts()[0] == 1
