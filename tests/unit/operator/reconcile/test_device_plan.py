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
    made = SimulatedCluster(devices={"count": count, **devices}, **sizes)
    made.settle()
    made.run()
    made.settle()
    return made


def record(made: SimulatedCluster, **sizes: Any) -> str:
    """Return the coordinator's plan for a job, PLAN but for some sizes."""
    job = parse_job(made.job).job
    assert job is not None
    plan = {
        "request": plan_request(job.spec),
        "summary": "Dedicated 3; training pipeline 2",
        "predictedSeconds": 2.5,
        "sizes": PLAN | sizes,
    }
    return json.dumps(plan)


def report(made: SimulatedCluster, **sizes: Any) -> None:
    """Let the coordinator report its plan."""
    made.read("Starting", 0, working={}, replicas={}, device_plan=record(made, **sizes))
    made.settle()


def uids(made: SimulatedCluster) -> dict[str, str]:
    """Return the uid of every pod."""
    return {name: pod["metadata"]["uid"] for name, pod in made.pods.items()}


def document(made: SimulatedCluster) -> Mapping[str, Any]:
    """Return the job that processes read."""
    written: Mapping[str, Any] = json.loads(made.bodies[CONFIG_MAP]["data"]["job.json"])
    return written


def test_no_worker_exists_before_the_plan_and_then_those_of_the_plan() -> None:
    made = cluster()
    assert made.workers == ["coordinator"]
    assert made.phase == "Starting"
    assert "waits for the plan" in made.running_message
    assert [group["name"] for group in made.job["status"]["groups"]] == ["coordinator"]
    before = made.pods[made.name("coordinator")]["metadata"]["uid"]
    report(made)
    assert made.workers == PLANNED
    assert made.pods[made.name("coordinator")]["metadata"]["uid"] == before, "it goes on with its own plan"
    assert made.job["status"]["plan"]["devices"] == json.loads(record(made)) | {
        "sizes": made.job["status"]["plan"]["devices"]["sizes"]
    }
    read = read_job(document(made))
    assert not read.spec.awaits_plan
    assert (read.spec.generation.replicas, read.spec.training.parallelism.pipeline) == (3, 2)
    assert made.job["spec"]["generation"] == TEMPLATE, "the user's manifest stays"
    assert made.settle().idle


def test_the_plan_stays_while_the_job_lives_also_if_another_one_is_reported() -> None:
    made = cluster()
    report(made)
    made.run()
    plan, before = made.job["status"]["plan"]["devices"], uids(made)
    report(made, inference={"replicas": 1})
    made.later(11)
    made.read(replicas={"generation": 3, "inference": 0})  # a restarted coordinator reads the sizes and reports no plan
    made.settle()
    assert made.job["status"]["plan"]["devices"] == plan
    assert uids(made) == before
    made.evict("generation-1")
    made.turn()
    assert made.workers == PLANNED


def test_an_upgrade_of_the_operator_leaves_the_plan() -> None:
    made = cluster()
    report(made)
    made.run()
    before = uids(made)
    with next_version() as images:
        made.images = images
        made.job = with_defaults(made.job, job_schema())
        made.settle()
        assert uids(made) == before


def test_workers_of_a_job_whose_status_is_lost_stay_until_its_plan_is_reported_again() -> None:
    made = cluster()
    report(made)
    made.run()
    before, made.reading = uids(made), None
    del made.job["status"]
    made.settle()
    assert uids(made) == before
    report(made)
    assert uids(made) == before
    assert made.job["status"]["plan"]["devices"]["summary"] == "Dedicated 3; training pipeline 2"


def suspended(made: SimulatedCluster) -> None:
    made.job["spec"]["suspend"] = True
    for _ in range(3):
        made.turn()
    assert made.workers == []
    made.reading = None  # a job without pods is not read
    made.settle()


def resumed(made: SimulatedCluster) -> None:
    made.job["spec"]["suspend"] = False
    made.settle()
    made.run()
    made.settle()


def test_a_resumed_job_has_its_plan_at_once() -> None:
    made = cluster()
    report(made)
    made.run()
    suspended(made)
    made.job["spec"]["suspend"] = False
    made.settle()
    assert made.workers == PLANNED


def test_other_devices_in_a_suspended_job_get_another_plan_at_its_start() -> None:
    made = cluster()
    report(made)
    made.run()
    suspended(made)
    made.job["spec"]["devices"] = {"count": 4}
    resumed(made)
    assert made.workers == ["coordinator"]
    assert "devices" not in made.job["status"].get("plan", {})
    report(made, generation=PLAN["generation"] | {"replicas": 1})
    assert made.workers == ["coordinator", "generation-0", "training-0", "training-1"]


def test_a_fixed_size_is_the_manifests() -> None:
    made = cluster(6, fixed=["Inference"])
    report(made)
    assert "inference-0" in made.workers


def test_a_colocated_plan_has_its_ranks_in_generation_workers() -> None:
    made = cluster()
    report(made, placement="Colocated")
    assert made.workers == PLANNED[:4]
    assert document(made)["spec"]["placement"] == "Colocated"


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
    made = cluster()
    report(made, **sizes)
    made.later(11)  # messages are written at most every ten seconds
    made.settle()
    assert made.workers == ["coordinator"]
    assert words in made.running_message


def test_a_job_with_devices_is_no_gang() -> None:
    made = cluster()
    made.served = ServedApis(frozenset({"scheduling.k8s.io/v1alpha2"}))
    report(made)
    assert made.workers == PLANNED
    assert {kind for kind, _ in made.applied} <= {"ConfigMap", "Secret", "Service", "NetworkPolicy"}
    assert "has no gang" in made.condition("Admitted")["message"]
