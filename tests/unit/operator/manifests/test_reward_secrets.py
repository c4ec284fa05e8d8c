"""Secrets of users' code: the kubelet or the caller's environment provides them; no object contains one."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_cli.local.devices import DeviceShare
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.pods_to_processes import local_processes
from rlhf_cli.local.ports import JobPorts
from rlhf_cli.local.run_folder import RunPaths
from rlhf_common.names import Group
from rlhf_operator.manifests import Images, render

GOLDEN = Path(__file__).parent / "golden"
VARIABLE = "RLHF_SECRET_JUDGE_TOKEN"
REFERENCE = {"secretKeyRef": {"name": "judge", "key": "token"}}
SECRET = "sk-tell-nobody"

ENV = [{"name": "JUDGE_TOKEN", **REFERENCE}, {"name": "AGAIN", **REFERENCE}, {"name": "MODE", "value": "fast"}]
GIVEN: list[dict[str, Any]] = [
    {"function": {"configMap": "my-reward", "env": ENV}},
    {"endpoint": {"url": "http://r:8000/", "headers": [{"name": "Authorization", **REFERENCE}]}},
]


def job_of(reward: dict[str, Any]) -> RLHFJob:
    document = yaml.safe_load((GOLDEN / "ppo-cpu.job.yaml").read_text())
    document["spec"]["models"]["reward"] = reward
    return RLHFJob.model_validate(document)


@pytest.mark.parametrize("reward", GIVEN)
def test_pods_that_run_rewards_take_it_from_the_secret_and_no_other_pod_does(reward: dict[str, Any]) -> None:
    objects = render(job_of(reward), {}, Images(), {})
    for pod in objects.pods:
        (container,) = (container for container in pod["spec"]["containers"] if container["name"] == "worker")
        env = [item for item in container["env"] if item["name"].startswith("RLHF_SECRET_")]
        group = pod["metadata"]["labels"]["rlhf.dev/group"]
        runs = group in (Group.GENERATION, Group.INFERENCE)
        assert env == ([{"name": VARIABLE, "valueFrom": REFERENCE}] if runs else []), group


@pytest.mark.parametrize("reward", GIVEN)
def test_the_configuration_holds_the_reference_alone(reward: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    objects = render(job_of(reward), {}, Images(), {})
    assert SECRET not in json.dumps(objects.all)
    (configuration,) = (item for item in objects.supporting if item["kind"] == "ConfigMap")
    assert '"key": "token"' in configuration["data"]["job.json"]


def test_what_takes_turns_is_given_its_own_secret_in_generation_pods_alone() -> None:
    own = {"secretKeyRef": {"name": "search", "key": "token"}}
    job = job_of({"function": {"configMap": "my-reward", "env": ENV}})
    document = job.model_dump(by_alias=True, exclude_unset=True)
    env = [{"name": "SEARCH_TOKEN", **own}, {"name": "JUDGE_TOKEN", **REFERENCE}]
    document["spec"]["rollout"]["environment"] = {"module": "mine.game", "env": env}
    of_rewards = [{"name": VARIABLE, "valueFrom": REFERENCE}]
    wanted = {
        Group.GENERATION: [*of_rewards, {"name": "RLHF_SECRET_SEARCH_TOKEN", "valueFrom": own}],
        Group.INFERENCE: of_rewards,
    }
    for pod in render(RLHFJob.model_validate(document), {}, Images(), {}).pods:
        (container,) = (container for container in pod["spec"]["containers"] if container["name"] == "worker")
        secrets = [item for item in container["env"] if item["name"].startswith("RLHF_SECRET_")]
        group = Group(pod["metadata"]["labels"]["rlhf.dev/group"])
        assert secrets == wanted.get(group, []), group


def local(caller: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return process -> its own variables, for a run on one machine."""
    objects = render(job_of({"function": {"file": "/data/reward.py", "env": ENV}}), {}, Images(), {})
    shares = {name: DeviceShare() for name in ["coordinator", *(f"{g.value}-{i}" for g in Group for i in range(8))]}
    paths, ports = RunPaths(Path("/run/job"), Path("/work")), JobPorts(itertools.count(40000))
    return {
        local_process.name: local_process.env
        for local_process in local_processes(objects, paths, shares, ports, caller)
    }


def test_on_one_machine_it_comes_from_the_callers_environment() -> None:
    result = local({VARIABLE: SECRET})
    processes = {name for name, env in result.items() if env.get(VARIABLE) == SECRET}
    assert processes == {name for name in result if name.startswith(("generation", "inference"))}
    with pytest.raises(RunError, match=f"key token of Secret judge needs a cluster; set {VARIABLE} in the environment"):
        local({"HOME": "/home/me"})
