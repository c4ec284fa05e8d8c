"""A job on a real node is suspended, gets another backend and other ranks, and continues where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs_in_pods.gated_job import OPEN, RECORD, GatedJob
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.full


PATIENCE = 600.0  # seconds for any one fact
ITERATIONS = 4
OTHER = {"backend": "megatron", "parallelism": {"pipeline": 1}}
"""The new layout: one rank with Megatron's layers instead of two pipeline stages of the torch backend."""


def test_a_suspended_job_goes_on_by_another_backend_and_other_ranks(
    node_cluster: Cluster, operator: OperatorProcess, tmp_path: Path
) -> None:
    job = GatedJob(node_cluster, "other-layout", tmp_path / "job", forgiven=0, iterations=ITERATIONS, every=2)
    job.apply()

    def until(event: str, holds: object) -> None:
        wait_until(event, holds, PATIENCE, check=operator.check, every=0.5)  # type: ignore[arg-type]

    job.allow(2)
    until("two iterations to be trained", lambda: job.trained() >= 2)
    assert job.pod("training-1"), "two ranks"
    with pytest.raises(ClusterError, match="can be changed in a suspended job only"):
        job.patch(training=OTHER)

    job.patch(suspend=True)
    until("the job to be suspended", lambda: job.condition("Suspended").get("status") == "True")
    job.patch(training=OTHER)
    job.patch(suspend=False)
    job.allow(OPEN)
    until("the job to run", lambda: job.condition("Running").get("status") == "True")
    until("the second rank to be gone", lambda: not job.pod("training-1"))
    until("the job to complete", lambda: job.condition("Complete").get("status") == "True")
    lines = (job.folder / RECORD).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(ITERATIONS))
    assert job.restarts() == (0, 0)
    assert not job.pod("training-1"), "it has not come back"
