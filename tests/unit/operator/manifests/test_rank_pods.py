"""Pods of several training ranks: their number and requests; a pod of one rank is unchanged."""

from typing import Any

import pytest
import yaml
from tests.support.operator.pod_templates import MANIFEST

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.gang import members
from rlhf_operator.manifests import Images, TemplateError, render
from rlhf_operator.manifests.rendering import group_sizes, pod


def job(pipeline: int, data: int, each: int, **training: Any) -> RLHFJob:
    document = yaml.safe_load(MANIFEST)
    sizes = {"pipeline": pipeline, "data": data}
    document["spec"]["training"] = {"parallelism": sizes, "ranksPerPod": each, **training}
    return RLHFJob.model_validate(document)


def training_pods(rlhf_job: RLHFJob) -> list[dict[str, Any]]:
    return [
        each
        for each in render(rlhf_job, {}, Images()).pods
        if each["metadata"]["labels"][names.LABEL_GROUP] == "training"
    ]


def variables(body: dict[str, Any]) -> dict[str, str]:
    [container] = body["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"]}


def ports(value: str) -> list[int]:
    return [int(entry.rpartition(":")[2]) for entry in value.split(",")]


def test_32_ranks_on_nodes_of_eight_are_four_pods_and_each_has_what_eight_pods_had() -> None:
    several, single = training_pods(job(8, 4, 8, gpusPerReplica=1)), training_pods(job(8, 4, 1, gpusPerReplica=1))
    assert (len(several), len(single)) == (4, 32)
    [container], [alone] = several[3]["spec"]["containers"], single[0]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "rlhf_workers.rank_launcher"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert int(container["resources"]["requests"]["cpu"]) == 8 * int(alone["resources"]["requests"]["cpu"])
    assert container["livenessProbe"] == alone["livenessProbe"]
    assert several[0]["metadata"]["annotations"].keys() == single[0]["metadata"]["annotations"].keys()
    [shm] = [volume["emptyDir"] for volume in several[3]["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": "5120Mi"}


def test_each_rank_has_ports_of_its_own_at_the_name_of_its_pod() -> None:
    environment = variables(training_pods(job(32, 2, 64, gpusPerReplica=1))[0])
    every = [
        port
        for name in ("RLHF_LISTEN", "RLHF_RANK_METRICS", "RLHF_RENDEZVOUS_PORT", "RLHF_METRICS")
        for port in ports(environment[name])
    ]
    assert len(set(every)) == len(every) == 3 * 64 + 1
    assert names.COORDINATOR_PORT not in every
    assert ports(environment["RLHF_ADVERTISE"]) == ports(environment["RLHF_LISTEN"])
    assert len({entry.rpartition(":")[0] for entry in environment["RLHF_ADVERTISE"].split(",")}) == 1
    assert environment["RLHF_DEVICE"].split(",") == [f"cuda:{rank}" for rank in range(64)]


def test_a_pod_of_one_rank_is_what_it_was() -> None:
    [body, _] = training_pods(job(2, 1, 1))
    [container] = body["spec"]["containers"]
    assert container["command"] == ["python", "-m", "rlhf_workers"]
    environment = variables(body)
    assert not {"RLHF_RANKS", "RLHF_RANK_METRICS", "RLHF_RENDEZVOUS_PORT"} & environment.keys()
    assert (environment["RLHF_LISTEN"], environment["RLHF_DEVICE"]) == ("[::]:7710", "cpu")
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
    [shm] = [volume["emptyDir"] for volume in body["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory"}


def test_gangs_count_pods_and_ask_for_all_their_devices() -> None:
    rlhf_job = job(4, 2, 4, gpusPerReplica=1)
    assert group_sizes(rlhf_job)[Group.TRAINING] == members.minimum(rlhf_job)[Group.TRAINING] == 2
    assert members.min_resources(rlhf_job, members.examples(rlhf_job))["nvidia.com/gpu"] == "8"


def test_the_number_of_a_pod_stays_open_in_a_template_of_pods() -> None:
    text = str(pod(job(4, 2, 4), Group.TRAINING, "$(rlhf.dev/index)", Images()))
    assert text.replace("$(rlhf.dev/index)", "1") == str(pod(job(4, 2, 4), Group.TRAINING, 1, Images())).replace(
        "'$(rlhf.dev/index)'", "'1'"
    )


def test_a_template_gives_all_devices_of_the_pod_or_is_told_so() -> None:
    def template(gpus: int) -> dict[str, Any]:
        return {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]}}

    training_pods(job(4, 2, 4, gpusPerReplica=1, template=template(4)))
    with pytest.raises(TemplateError, match=r"4 nvidia.com/gpu"):
        training_pods(job(4, 2, 4, gpusPerReplica=1, template=template(1)))
