"""Which jobs get the image with vLLM; a job keeps the image it was started with."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import IMAGES, SimulatedCluster, template_with_image
from tests.support.operator.upgraded_job import container, edit, settle

from rlhf_operator.manifests import Images

WITH_VLLM = Images(IMAGES.coordinator, IMAGES.worker, IMAGES.user, "example.org/worker-vllm:1")
NEXT = Images(IMAGES.coordinator, "example.org/worker:2", IMAGES.user, "example.org/worker-vllm:2")


def started(images: Images, **generation: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(generation={"replicas": 2, **generation})
    cluster.images = images
    cluster.settle()
    cluster.begin()
    return cluster


@pytest.mark.parametrize(
    ("generation", "image"),
    [
        ({"engine": "vllm"}, WITH_VLLM.vllm_worker),
        ({"engine": "vllm", "gpusPerReplica": 4, "parallelism": {"tensor": 4}}, WITH_VLLM.vllm_worker),
        ({"engine": "Auto", "gpusPerReplica": 1}, WITH_VLLM.vllm_worker),
        ({"engine": "Auto"}, WITH_VLLM.worker),
        ({"engine": "torch"}, WITH_VLLM.worker),
        ({"engine": "my_package.my_engine"}, WITH_VLLM.worker),
        ({"engine": "vllm", "template": template_with_image("mine:1")}, "mine:1"),
    ],
)
def test_generation_workers_of_vllm_get_its_image_and_all_others_that_of_workers(
    generation: dict[str, Any], image: str
) -> None:
    cluster = started(WITH_VLLM, **generation)
    assert container(cluster, "generation-0")["image"] == image
    assert container(cluster, "inference-0")["image"] == container(cluster, "training-1")["image"] == WITH_VLLM.worker
    assert cluster.job["status"]["revision"]["vllmWorkerImage"] == WITH_VLLM.vllm_worker


def test_an_installation_without_such_an_image_gives_everybody_the_one_it_has() -> None:
    cluster = started(IMAGES, engine="vllm")
    assert container(cluster, "generation-0")["image"] == IMAGES.worker
    assert "vllmWorkerImage" not in cluster.job["status"]["revision"]


@pytest.mark.parametrize("images", [WITH_VLLM, IMAGES])
def test_a_job_keeps_the_image_it_was_started_by(images: Images) -> None:
    cluster = started(images, engine="vllm")
    before = container(cluster, "generation-0")["image"]
    cluster.images = NEXT
    edit(cluster, generation=cluster.job["spec"]["generation"] | {"replicas": 3})
    settle(cluster)
    assert container(cluster, "generation-2")["image"] == before
    assert container(cluster, "inference-0")["image"] == IMAGES.worker
