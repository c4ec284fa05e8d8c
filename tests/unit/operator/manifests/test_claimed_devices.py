"""A template whose claim provides the GPUs gets no additional nvidia.com/gpu resource."""

from typing import Any

from tests.support.operator.pod_templates import job_with

from rlhf_common.names import Group
from rlhf_operator.manifests import Images
from rlhf_operator.manifests.rendering import pod

CLAIMS = [{"name": "gpu"}]


def template(**container: Any) -> dict[str, Any]:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    return {"spec": {"resourceClaims": claims, "containers": [{"name": "worker", **container}]}}


def container_of(gpus: int, **container: Any) -> dict[str, Any]:
    job = job_with(template(**container))
    group = job.spec.generation.model_copy(update={"gpus_per_replica": gpus})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"generation": group})})
    result: dict[str, Any] = pod(job, Group.GENERATION, 0, Images())["spec"]["containers"][0]
    return result


def test_a_claim_that_gives_the_gpu_stands_for_the_resource() -> None:
    for gpus in (0, 1):
        container = container_of(
            gpus,
            env=[{"name": "RLHF_DEVICE", "value": "cuda:0"}],
            resources={"claims": CLAIMS, "limits": {"memory": "8Gi"}},
        )
        assert container["resources"]["claims"] == CLAIMS
        assert container["resources"]["limits"] == {"memory": "8Gi"}
        assert "nvidia.com/gpu" not in container["resources"]["requests"]
        assert [each["value"] for each in container["env"] if each["name"] == "RLHF_DEVICE"] == ["cuda:0"]


def test_a_claim_of_something_else_stands_beside_the_resource() -> None:
    container = container_of(1, resources={"claims": CLAIMS})
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["resources"]["claims"] == CLAIMS
