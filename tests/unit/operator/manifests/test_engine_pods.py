"""vLLM's settings in pods of generation workers, and the changes that a template may make; other pods stay
unchanged."""

from typing import Any

import pytest
import yaml
from tests.support.operator.pod_templates import MANIFEST

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.manifests import Images, TemplateError, render
from rlhf_operator.manifests.engine_pods import CACHES, LOOPBACK, OFFLINE, SILENT
from rlhf_operator.manifests.rendering import pod


def job(template: dict[str, Any] | None = None, **generation: Any) -> RLHFJob:
    document = yaml.safe_load(MANIFEST)
    document["spec"]["generation"] = {**generation, "template": template or {}}
    return RLHFJob.model_validate(document)


def worker_of(job: RLHFJob) -> dict[str, Any]:
    container: dict[str, Any] = pod(job, Group.GENERATION, 0, Images())["spec"]["containers"][0]
    return container


def environment(job: RLHFJob) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in worker_of(job)["env"]}


def shm(job: RLHFJob) -> dict[str, Any]:
    volumes = pod(job, Group.GENERATION, 0, Images())["spec"]["volumes"]
    [found] = [volume["emptyDir"] for volume in volumes if volume["name"] == "shm"]
    return dict(found)


SPLIT: dict[str, Any] = {"engine": "vllm", "gpusPerReplica": 4, "parallelism": {"tensor": 4}}


def test_vllm_writes_below_tmp_reports_to_nobody_and_asks_no_hub_for_what_lies_in_folders() -> None:
    variables = environment(job(engine="vllm"))
    assert {
        name: variables[name] for name in CACHES | SILENT | LOOPBACK | OFFLINE
    } == CACHES | SILENT | LOOPBACK | OFFLINE
    assert all(folder.startswith("/tmp") for folder in CACHES.values())
    assert "VLLM_SERVER_DEV_MODE" not in variables


def test_a_model_of_the_hub_may_be_fetched() -> None:
    document = yaml.safe_load(MANIFEST)
    document["spec"]["generation"] = {"engine": "vllm"}
    document["spec"]["models"]["actor"]["path"] = "org/policy"
    variables = environment(RLHFJob.model_validate(document))
    assert not OFFLINE.keys() & variables.keys()
    assert variables.keys() >= SILENT.keys()


def test_other_engines_and_groups_are_as_they_were() -> None:
    for engine in ("torch", "my_package.my_engine"):
        assert not (CACHES | SILENT | LOOPBACK | OFFLINE).keys() & environment(job(engine=engine)).keys()
    for body in render(job(engine="vllm"), {}, Images()).pods:
        if "generation" not in body["metadata"]["name"]:
            assert "VLLM" not in str(body)


def test_processes_of_one_worker_have_bounded_shared_memory_that_their_memory_counts() -> None:
    split, whole = job(**SPLIT), job(engine="vllm", gpusPerReplica=1)
    assert shm(split) == {"medium": "Memory", "sizeLimit": "3072Mi"}
    assert worker_of(split)["resources"] == {
        "requests": {"cpu": "4", "memory": "4096Mi", "nvidia.com/gpu": "4"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    assert shm(whole) == {"medium": "Memory"}
    assert worker_of(whole)["resources"]["requests"]["memory"] == "1Gi"


def test_a_split_on_cpu_asks_for_the_threads_of_every_process() -> None:
    split = worker_of(job(engine="vllm", parallelism={"tensor": 2}, cpuThreads=3))
    assert split["resources"]["requests"]["cpu"] == "6"
    assert "limits" not in split["resources"]


def limited(memory: str) -> dict[str, Any]:
    return {"containers": [{"name": "worker", "resources": {"limits": {"memory": memory}}}]}


def test_a_limit_that_shared_memory_may_fill_alone_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match='"3Gi": must be more than 3072Mi, which /dev/shm may take'):
        worker_of(job({"spec": limited("3Gi")}, **SPLIT))
    assert worker_of(job({"spec": limited("64Gi")}, **SPLIT))["resources"]["limits"]["memory"] == "64Gi"
    assert worker_of(job({"spec": limited("1Gi")}, engine="vllm"))["resources"]["limits"]["memory"] == "1Gi"
    own = limited("3Gi") | {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]}
    assert shm(job({"spec": own}, **SPLIT)) == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_a_template_may_keep_what_is_compiled_on_a_volume_and_may_open_no_route_of_developers() -> None:
    def with_variable(name: str, value: str) -> dict[str, Any]:
        return {"spec": {"containers": [{"name": "worker", "env": [{"name": name, "value": value}]}]}}

    variables = environment(job(with_variable("VLLM_CACHE_ROOT", "/cache/vllm"), engine="vllm"))
    assert variables["VLLM_CACHE_ROOT"] == "/cache/vllm"
    for engine in ("vllm", "torch"):
        with pytest.raises(
            TemplateError, match="opens routes that let everyone who reaches the port control the engine"
        ):
            worker_of(job(with_variable("VLLM_SERVER_DEV_MODE", "1"), engine=engine))


def test_a_worker_of_vllm_listens_where_every_worker_does() -> None:
    split, plain = worker_of(job(**SPLIT)), worker_of(job())
    assert split["ports"] == plain["ports"]
    assert split["command"] == plain["command"]
