"""Training ranks in generation pods: the operator's objects for the job, and the replacement of its pods."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job, template_with_image

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_common.names import Env, Group
from rlhf_operator.gang.members import examples, min_resources, minimum
from rlhf_operator.manifests.rendering import Images, pod, render
from rlhf_operator.reconcile.parsed_job import parse_job

CHECKPOINTS = {"path": "/checkpoints"}
GPUS = {"replicas": 3, "gpusPerReplica": 1}


def colocated(**spec: Any) -> dict[str, Any]:
    return stored_job(**({"placement": "Colocated", "generation": GPUS, "inference": {"replicas": 0}} | spec))


def job(**spec: Any) -> RLHFJob:
    result = parse_job(colocated(**spec))
    assert result.job is not None, result.problem
    return result.job


def environment(body: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in body["spec"]["containers"][0]["env"]}


def test_ranks_have_no_pods_and_generation_pods_are_what_ranks_need() -> None:
    objects = render(job(), {})
    names = [body["metadata"]["name"] for body in objects.pods]
    assert names == ["job-coordinator", "job-generation-0", "job-generation-1", "job-generation-2"]
    rank = objects.pods[1]
    assert environment(rank)[Env.RENDEZVOUS] == "job-generation-0.job.team.svc"
    assert rank["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    dedicated = parse_job(stored_job()).job
    assert dedicated is not None
    assert Env.RENDEZVOUS not in environment(pod(dedicated, Group.GENERATION, 0, Images()))


def test_every_rank_is_of_the_gang_and_the_rest_of_generation_is_elastic() -> None:
    assert minimum(job()) == {Group.COORDINATOR: 1, Group.GENERATION: 2}
    assert min_resources(job(), examples(job()))["nvidia.com/gpu"] == "2"


def test_the_coordinator_mounts_what_ranks_mount_and_a_template_of_no_pod_is_refused() -> None:
    volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "claim"}}
    mount = {"name": "checkpoints", "mountPath": "/checkpoints"}
    mounting = {"spec": {"volumes": [volume], "containers": [{"name": "worker", "volumeMounts": [mount]}]}}
    coordinator = pod(job(generation=GPUS | {"template": mounting}), Group.COORDINATOR, 0, Images())
    assert volume in coordinator["spec"]["volumes"]
    assert mount in coordinator["spec"]["containers"][0]["volumeMounts"]
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "template": mounting}
    result = parse_job(colocated(training=training))
    assert not result.planned
    assert result.problem.startswith("spec.training.template = ")
    assert result.problem.endswith("spec.placement Colocated: move it to spec.generation.template")


def test_generation_cannot_be_scaled_below_its_ranks_nor_placement_changed() -> None:
    result = parse_job(colocated(generation=GPUS | {"replicas": 1}))
    assert result.problem.startswith("spec.generation.replicas = 1: must be at least pipeline x data")
    assert parse_job(colocated(generation=GPUS | {"replicas": 0}, suspend=True)).planned
    before, after = job(), parse_job(stored_job(generation=GPUS, inference={"replicas": 0})).job
    assert after is not None
    assert [problem.field for problem in manifest.forbidden_changes(before, after)] == ["spec.placement"]


@pytest.mark.parametrize("checkpoints", [None, CHECKPOINTS])
def test_a_new_template_replaces_pods_with_ranks_all_at_once(checkpoints: dict[str, str] | None) -> None:
    cluster = SimulatedCluster(
        placement="Colocated", generation={"replicas": 2}, inference={"replicas": 0}, checkpoints=checkpoints
    )
    cluster.begin()
    cluster.job["spec"]["generation"] |= {"template": template_with_image("new:1")}
    cluster.job["metadata"]["generation"] += 1
    cluster.settle()
    workers = ["job-generation-0", "job-generation-1"]
    leaving = sorted(cluster.deleting)
    assert leaving == (["job-coordinator"] if checkpoints else workers), "a checkpoint first, if there are any"
    for _ in range(3):
        cluster.bring_up()
        cluster.settle()
    assert {cluster.image(f"generation-{index}") for index in range(2)} == {"new:1"}
    assert cluster.condition("Restarting")["status"] == "False"


def test_workers_beyond_the_ranks_are_made_as_what_they_are() -> None:
    cluster = SimulatedCluster(placement="Colocated", generation=GPUS | {"replicas": 3})
    cluster.settle()
    stored = parse_job(cluster.job).job
    assert stored is not None
    for index in range(3):
        body = cluster.pods[f"job-generation-{index}"]
        expected = pod(stored, Group.GENERATION, index, Images())
        assert body["spec"] == expected["spec"]
        assert body["metadata"]["annotations"] == expected["metadata"]["annotations"]
