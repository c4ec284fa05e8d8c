"""A job in pods lets its devices be divided, is suspended, and goes on with another number of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs_in_pods.gated_job import OPEN, RECORD, GatedJob
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

from rlhf_api.device_sizes import DevicePlanRecord, job_devices, planned_document
from rlhf_api.protocol import read_job

pytestmark = pytest.mark.full


PATIENCE = 600.0  # seconds for any one fact; some dozen on two idle cores
ITERATIONS = 3
DEVICES = 4
FEWER = 2


def test_a_job_chooses_its_sizes_and_others_for_other_devices(
    node_cluster: Cluster, operator: OperatorProcess, tmp_path: Path
) -> None:
    job = GatedJob(node_cluster, "chosen-sizes", tmp_path / "job", forgiven=0, iterations=ITERATIONS, every=1)
    spec = job.manifest["spec"]
    del spec["generation"]["replicas"], spec["inference"]["replicas"], spec["training"]["parallelism"]
    spec["devices"] = {"count": DEVICES}
    job.apply()

    def until(event: str, holds: object) -> None:
        wait_until(event, holds, PATIENCE, check=operator.check, every=0.5)  # type: ignore[arg-type]

    def plan() -> dict[str, Any]:
        """Return the recorded plan; empty before there is one."""
        return dict(job.seen().get("status", {}).get("plan", {}).get("devices") or {})

    def expected() -> set[str]:
        """Return the pods of the recorded plan."""
        seen = job.seen()
        sized = read_job(planned_document(seen, DevicePlanRecord.model_validate(plan()).sizes)).spec
        assert job_devices(sized) <= seen["spec"]["devices"]["count"]
        counts = {"generation": sized.generation.replicas, "inference": sized.inference.replicas}
        counts |= {"training": sized.training.ranks} if sized.placement == "Dedicated" else {}
        return {f"tiny-{group}-{index}" for group, count in counts.items() for index in range(count)}

    def pods() -> set[str]:
        """Return the pods other than the coordinator's."""
        listed = json.loads(job.kubectl("get", "pods", "--output=json"))["items"]
        return {pod["metadata"]["name"] for pod in listed} - {"tiny-coordinator"}

    job.allow(1)
    until("the plan to be recorded", plan)
    first = plan()
    until("an iteration to be trained", lambda: job.trained() >= 1)
    assert pods() == expected()
    assert first["summary"] in job.kubectl("describe", "rlhfjob", "tiny")
    with pytest.raises(ClusterError, match="can be changed in a suspended job only"):
        job.patch(devices={"count": FEWER})

    job.patch(suspend=True)
    until("the job to be suspended", lambda: job.condition("Suspended").get("status") == "True")
    assert plan() == first
    job.patch(devices={"count": FEWER})
    job.patch(suspend=False)
    job.allow(OPEN)
    until("another plan to be recorded", lambda: plan().get("request") not in (None, first["request"]))
    until("the job to run", lambda: job.condition("Running").get("status") == "True")
    assert pods() == expected()
    until("the job to complete", lambda: job.condition("Complete").get("status") == "True")
    lines = (job.folder / RECORD).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(ITERATIONS))
    assert job.restarts() == (0, 0)
