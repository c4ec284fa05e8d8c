"""Effects of the operator's installation on a job's objects: who runs its pods, and access to it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_common.names import Env
from rlhf_operator.__main__ import options
from rlhf_operator.manifests import Images, render
from rlhf_operator.manifests.network import network_policy

OWNERS = ("runAsUser", "runAsGroup", "fsGroup")


def job(**spec: Any) -> RLHFJob:
    body = yaml.safe_load((Path(__file__).parent / "golden" / "ppo-cpu.job.yaml").read_text())
    body["spec"] |= spec
    return RLHFJob.model_validate(body)


def pods(job: RLHFJob, user: int | None) -> dict[str, dict[str, Any]]:
    rendered = render(job, {}, Images("operator:1", "worker:1", user)).pods
    return {item["metadata"]["name"]: item["spec"] for item in rendered}


def test_pods_are_of_one_user_or_of_whom_the_cluster_chooses() -> None:
    """OpenShift rejects a user outside its namespace's range."""
    for spec in pods(job(), 1000680000).values():
        assert [spec["securityContext"][name] for name in OWNERS] == [1000680000] * 3
    for spec in pods(job(), None).values():
        assert not spec["securityContext"].keys() & set(OWNERS)
        assert spec["securityContext"]["runAsNonRoot"] is True
        (certificates,) = [volume for volume in spec["volumes"] if volume["name"] == "certificates"]
        assert certificates["secret"]["defaultMode"] == 0o444, "no group that is known may read it"


def test_a_templates_user_wins_over_that_of_the_installation() -> None:
    training = {"template": {"spec": {"securityContext": {"runAsUser": 1234}}}}
    for user in (None, 10001):
        result = {
            name: spec["securityContext"].get("runAsUser") for name, spec in pods(job(training=training), user).items()
        }
        ranks = {name for name in result if "training" in name or "coordinator" in name}
        assert {result[name] for name in ranks} == {1234}
        assert {result[name] for name in result.keys() - ranks} == {user}


@pytest.mark.parametrize(("arguments", "user"), [([], 10001), (["--run-as-user=7"], 7), (["--run-as-user=none"], None)])
def test_the_flag_names_the_user(arguments: list[str], user: int | None) -> None:
    assert options(arguments).images.user == user


@pytest.mark.parametrize("value", ["0", "-1", "root", "2147483648", ""])
def test_a_user_that_cannot_be_is_refused_by_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options([f"--run-as-user={value}"])
    assert f"--run-as-user: {value}: must be a number from 1 to 2147483647, or none" in capsys.readouterr().err


def test_processes_of_pods_listen_on_every_address_of_either_family() -> None:
    for spec in pods(job(), None).values():
        said = {item["name"]: item["value"] for item in spec["containers"][0]["env"]}
        assert {said[name.value].rpartition(":")[0] for name in (Env.LISTEN, Env.METRICS)} == {"[::]"}


def test_the_operator_is_let_in_from_its_own_namespace_alone_where_that_is_known() -> None:
    """Its labels are public, and a tenant may give them to a pod."""
    from_namespace, from_anywhere = (
        network_policy(job(), home)["spec"]["ingress"][1]["from"] for home in ("rlhf-system", "")
    )
    assert [item["namespaceSelector"] for item in from_namespace] == [
        {"matchLabels": {"kubernetes.io/metadata.name": "rlhf-system"}}
    ]
    assert [item["namespaceSelector"] for item in from_anywhere] == [{}]
