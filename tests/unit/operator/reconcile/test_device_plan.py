"""A job with `spec.devices` has only a coordinator before its plan, and then the pods of the plan until it stops."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.operator.next_operator_version import next_version
from tests.support.operator.simulated_cluster import CONFIG_MAP, FILES, SimulatedCluster

from rlhf_api.device_sizes import plan_request
from rlhf_api.protocol import read_job
from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.reconcile.parsed_job import parse_job

TEMPLATE = {"template": {"spec": FILES}}
PLAN: dict[str, Any] = {
    "placement": "Dedicated",
    "generation": {"replicas": 3, "maxBatchSize": 64, "parallelism": {"tensor": 1}},
    "inference": {"replicas": 0},
    "training": {
        "parallelism": {"pipeline": 2},
        "microBatchSize": 4,
        "activationCheckpointing": False,
        "criticOverlap": "Disabled",
    },
}
PLANNED = ["coordinator", "generation-0", "generation-1", "generation-2", "training-0", "training-1"]
"""Pods of PLAN."""


def cluster(count: int = 5, **devices: Any) -> SimulatedCluster:
    """Return a job that asks for a plan and whose coordinator runs."""
    sizes = {"generation": TEMPLATE, "inference": {}, "training": TEMPLATE | {"microBatchSize": 8}}
    simulated = SimulatedCluster(devices={"count": count, **devices}, **sizes)
    simulated.settle()
    simulated.run()
    simulated.settle()
    return simulated


def record(simulated: SimulatedCluster, **sizes: Any) -> str:
    """Return the coordinator's plan for a job, PLAN but for some sizes."""
    job = parse_job(simulated.job).job
    assert job is not None
    plan = {
        "request": plan_request(job.spec),
        "summary": "Dedicated 3; training pipeline 2",
        "predictedSeconds": 2.5,
        "sizes": PLAN | sizes,
    }
    return json.dumps(plan)


def report(simulated: SimulatedCluster, **sizes: Any) -> None:
    """Let the coordinator report its plan."""
    simulated.read("Starting", 0, working={}, replicas={}, device_plan=record(simulated, **sizes))
    simulated.settle()


def uids(simulated: SimulatedCluster) -> dict[str, str]:
    """Return the uid of every pod."""
    return {name: pod["metadata"]["uid"] for name, pod in simulated.pods.items()}


def document(simulated: SimulatedCluster) -> Mapping[str, Any]:
    """Return the job that processes read."""
    written: Mapping[str, Any] = json.loads(simulated.bodies[CONFIG_MAP]["data"]["job.json"])
    return written


def test_no_worker_exists_before_the_plan_and_then_those_of_the_plan() -> None:
    simulated = cluster()
    assert simulated.workers == ["coordinator"]
    assert simulated.phase == "Starting"
    assert "waits for the plan" in simulated.running_message
    assert [group["name"] for group in simulated.job["status"]["groups"]] == ["coordinator"]
    before = simulated.pods[simulated.name("coordinator")]["metadata"]["uid"]
    report(simulated)
    assert simulated.workers == PLANNED
    assert simulated.pods[simulated.name("coordinator")]["metadata"]["uid"] == before, "it goes on with its own plan"
    assert simulated.job["status"]["plan"]["devices"] == json.loads(record(simulated)) | {
        "sizes": simulated.job["status"]["plan"]["devices"]["sizes"],
        "stages": {},
        "since": 0,
    }
    assert simulated.events.count("DevicesPlanned") == 1
    read = read_job(document(simulated))
    assert not read.spec.awaits_plan
    assert (read.spec.generation.replicas, read.spec.training.parallelism.pipeline) == (3, 2)
    assert simulated.job["spec"]["generation"] == TEMPLATE, "the user's manifest stays"
    assert simulated.settle().idle


def test_the_plan_stays_while_the_job_lives_also_if_another_one_is_reported() -> None:
    simulated = cluster()
    report(simulated)
    simulated.run()
    plan, before = simulated.job["status"]["plan"]["devices"], uids(simulated)
    report(simulated, inference={"replicas": 1})
    simulated.later(11)
    simulated.read(replicas={"generation": 3, "inference": 0})  # a restart: it reports no plan
    simulated.settle()
    assert simulated.job["status"]["plan"]["devices"] == plan
    assert uids(simulated) == before
    simulated.evict("generation-1")
    simulated.turn()
    assert simulated.workers == PLANNED


def test_the_drift_of_a_plan_is_shown_and_told_once() -> None:
    simulated = cluster()
    report(simulated)
    simulated.run()
    drift = "iterations take 5 s instead of the predicted 2 s: the plan stays, because no other plan is faster"
    for iteration in (3, 4):
        simulated.later(11)
        simulated.read(iteration=iteration, plan_drift=drift)
        simulated.settle()
    assert simulated.job["status"]["plan"]["drift"] == drift
    assert f"plan for spec.devices: {drift}" in simulated.running_message
    assert simulated.events.count("PlanDrift") == simulated.events.count("DevicesPlanned") == 1


def test_a_plan_that_would_change_by_itself_is_refused_by_name() -> None:
    simulated = SimulatedCluster(devices={"count": 5, "replan": "Auto"}, generation={}, inference={}, training={})
    simulated.settle()
    assert simulated.workers == []
    assert "spec.devices.replan" in simulated.condition("Planned")["message"]
    assert "is not available in a cluster: use Report" in simulated.condition("Planned")["message"]


def test_an_upgrade_of_the_operator_leaves_the_plan() -> None:
    simulated = cluster()
    report(simulated)
    simulated.run()
    before = uids(simulated)
    with next_version() as images:
        simulated.images = images
        simulated.job = with_defaults(simulated.job, job_schema())
        simulated.settle()
        assert uids(simulated) == before


def test_workers_of_a_job_whose_status_is_lost_stay_until_its_plan_is_reported_again() -> None:
    simulated = cluster()
    report(simulated)
    simulated.run()
    before, simulated.reading = uids(simulated), None
    del simulated.job["status"]
    simulated.settle()
    assert uids(simulated) == before
    report(simulated)
    assert uids(simulated) == before
    assert simulated.job["status"]["plan"]["devices"]["summary"] == "Dedicated 3; training pipeline 2"


def suspended(simulated: SimulatedCluster) -> None:
    simulated.job["spec"]["suspend"] = True
    for _ in range(3):
        simulated.turn()
    assert simulated.workers == []
    simulated.reading = None  # a job without pods is not read
    simulated.settle()


def resumed(simulated: SimulatedCluster) -> None:
    simulated.job["spec"]["suspend"] = False
    simulated.settle()
    simulated.run()
    simulated.settle()


def test_a_resumed_job_has_its_plan_at_once() -> None:
    simulated = cluster()
    report(simulated)
    simulated.run()
    suspended(simulated)
    simulated.job["spec"]["suspend"] = False
    simulated.settle()
    assert simulated.workers == PLANNED


@pytest.mark.parametrize("edited_at_once", [False, True])
def test_other_devices_in_a_suspended_job_get_another_plan_at_its_start(edited_at_once: bool) -> None:
    """The status has still a startTime when it first says that the job is suspended, and a user may edit it then."""
    simulated = cluster()
    report(simulated)
    simulated.run()
    started = simulated.job["status"]["startTime"]
    suspended(simulated)
    if edited_at_once:
        simulated.job["status"]["startTime"] = started
    simulated.job["spec"]["devices"] = {"count": 4}
    resumed(simulated)
    assert simulated.workers == ["coordinator"]
    assert "devices" not in simulated.job["status"].get("plan", {})
    report(simulated, generation=PLAN["generation"] | {"replicas": 1})
    assert simulated.workers == ["coordinator", "generation-0", "training-0", "training-1"]


def test_a_fixed_size_is_the_manifests() -> None:
    simulated = cluster(6, fixed=["Inference"])
    report(simulated)
    assert "inference-0" in simulated.workers


def test_a_colocated_plan_has_its_ranks_in_generation_workers() -> None:
    simulated = cluster()
    report(simulated, placement="Colocated")
    assert simulated.workers == PLANNED[:4]
    assert document(simulated)["spec"]["placement"] == "Colocated"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"generation": PLAN["generation"] | {"replicas": 4}}, "spec.devices.count = 5: must be at least 6"),
        ({"training": PLAN["training"] | {"microBatchSize": 7}}, "spec.algorithm.ppo.miniBatchSize"),
        ({"placement": "Anywhere"}, "sizes.placement"),
        ({"image": "mine"}, "sizes.image: Extra inputs are not permitted"),
    ],
)
def test_a_reported_plan_that_breaks_a_rule_makes_no_worker(sizes: dict[str, Any], words: str) -> None:
    simulated = cluster()
    report(simulated, **sizes)
    simulated.later(11)  # messages are written at most every ten seconds
    simulated.settle()
    assert simulated.workers == ["coordinator"]
    assert words in simulated.running_message


def test_a_job_with_devices_is_no_gang() -> None:
    simulated = cluster()
    simulated.served = ServedApis(frozenset({"scheduling.k8s.io/v1alpha2"}))
    report(simulated)
    assert simulated.workers == PLANNED
    assert {kind for kind, _ in simulated.applied} <= {"ConfigMap", "Secret", "Service", "NetworkPolicy"}
    assert "has no gang" in simulated.condition("Admitted")["message"]
