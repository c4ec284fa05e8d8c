"""Additions that a user's pod template may make to our pods, and fields that it may not remove."""

from typing import Any

import pytest
import yaml
from tests.support.operator.pod_templates import MANIFEST, generation, job_with, pods, spec, worker

from rlhf_api.job import RLHFJob
from rlhf_common.names import ANNOTATION_TEMPLATE, LABEL_GROUP, Env
from rlhf_operator.manifests import Images, TemplateError, render
from rlhf_operator.manifests.pods import NOT_SCRAPED, SCRAPED


def test_an_empty_template_changes_nothing() -> None:
    assert generation({}) == generation({"metadata": {}, "spec": {}}) == generation({"spec": {"containers": []}})


@pytest.mark.parametrize(
    ("template", "field"),
    [
        (spec(hostNetwork=True), "spec.hostNetwork"),
        (spec(hostPID=True), "spec.hostPID"),
        (spec(hostIPC=True), "spec.hostIPC"),
        (spec(automountServiceAccountToken=True), "spec.automountServiceAccountToken"),
        (spec(restartPolicy="Never"), "spec.restartPolicy"),
        (spec(subdomain="other"), "spec.subdomain"),
        (spec(securityContext={"runAsNonRoot": False}), "spec.securityContext.runAsNonRoot"),
        (spec(securityContext={"runAsUser": 0}), "spec.securityContext.runAsUser"),
        (spec(securityContext={"seccompProfile": {"type": "Unconfined"}}), "spec.securityContext.seccompProfile.type"),
        (spec(securityContext={"sysctls": []}), "spec.securityContext.sysctls"),
        (spec(volumes=[{"name": "models", "hostPath": {"path": "/models"}}]), "spec.volumes[0].hostPath"),
        (spec(volumes=[{"name": "certificates", "emptyDir": {}}]), "spec.volumes[0].name"),
        (spec(volumes=[{"name": "reward--environment", "emptyDir": {}}]), "spec.volumes[0].name"),
        (
            spec(volumes=[{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
            "spec.volumes[0].projected",
        ),
        (worker(securityContext={"privileged": True}), "spec.containers[0].securityContext.privileged"),
        (
            worker(securityContext={"allowPrivilegeEscalation": True}),
            "spec.containers[0].securityContext.allowPrivilegeEscalation",
        ),
        (
            worker(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
            "spec.containers[0].securityContext.capabilities.add",
        ),
        (
            worker(securityContext={"readOnlyRootFilesystem": False}),
            "spec.containers[0].securityContext.readOnlyRootFilesystem",
        ),
        (worker(command=["sh"]), "spec.containers[0].command"),
        (worker(args=["-x"]), "spec.containers[0].args"),
        (worker(env=[{"name": "RLHF_COORDINATOR", "value": "evil:1"}]), "spec.containers[0].env[0].name"),
        (worker(env=[{"name": "OMP_NUM_THREADS", "value": "9"}]), "spec.containers[0].env[0].name"),
        (worker(ports=[{"containerPort": 1, "hostPort": 1}]), "spec.containers[0].ports[0].hostPort"),
        (
            worker(volumeMounts=[{"name": "mine", "mountPath": "/etc/rlhf/certificates"}]),
            "spec.containers[0].volumeMounts[0].mountPath",
        ),
        (spec(containers=[{"image": "x"}]), "spec.containers[0].name"),
        (spec(initContainers=[{"name": "worker"}]), "spec.initContainers[0].name"),
        (
            spec(initContainers=[{"name": "setup", "securityContext": {"privileged": True}}]),
            "spec.initContainers[0].securityContext.privileged",
        ),
        ({"metadata": {"labels": {"rlhf.dev/group": "training"}}}, "metadata.labels"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}, "metadata.labels"),
        ({"kind": "PodTemplate"}, "kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_template_that_weakens_a_guarantee_is_refused_by_name(template: dict[str, Any], field: str) -> None:
    with pytest.raises(TemplateError) as refused:
        generation(template)
    (problem,) = refused.value.problems
    assert problem.field == f"spec.generation.template.{field}"
    assert str(problem) in str(refused.value)


def test_everything_else_is_the_users() -> None:
    pod = generation(
        {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "nodeSelector": {"zone": "x"},
                "schedulerName": "volcano",
                "terminationGracePeriodSeconds": 5,
                "securityContext": {"runAsUser": 2000, "supplementalGroups": [7]},
                "containers": [
                    {
                        "name": "worker",
                        "image": "mine:1",
                        "env": [{"name": "HOME", "value": "/home/me"}, {"name": "HF_TOKEN", "value": "t"}],
                        "resources": {"requests": {"memory": "9Gi"}, "limits": {"example.org/nic": "1"}},
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    },
                    {"name": "sidecar", "image": "side:1", "securityContext": {"capabilities": {"drop": ["NET_RAW"]}}},
                ],
                "volumes": [
                    {"name": "data", "persistentVolumeClaim": {"claimName": "d"}},
                    {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                ],
            },
        }
    )
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][LABEL_GROUP] == "generation"
    annotations = dict(pod["metadata"]["annotations"])
    assert annotations.pop(ANNOTATION_TEMPLATE)
    assert annotations == {"note": "b", **SCRAPED}
    body = pod["spec"]
    assert (body["nodeSelector"], body["schedulerName"], body["terminationGracePeriodSeconds"]) == (
        {"zone": "x"},
        "volcano",
        5,
    )
    assert body["securityContext"]["runAsUser"] == 2000
    assert body["securityContext"]["runAsNonRoot"] is True
    ours, sidecar = body["containers"]
    assert (ours["name"], ours["image"]) == ("worker", "mine:1")
    env = {variable["name"]: variable["value"] for variable in ours["env"]}
    assert (env["HOME"], env["HF_TOKEN"], env[Env.GROUP]) == ("/home/me", "t", "generation")
    assert ours["resources"] == {"requests": {"cpu": "1", "memory": "9Gi"}, "limits": {"example.org/nic": "1"}}
    assert {mount["mountPath"] for mount in ours["volumeMounts"]} == {
        "/etc/rlhf/certificates",
        "/tmp",
        "/dev/shm",
        "/data",
    }
    assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in body["volumes"]


def test_every_container_of_every_pod_is_restricted() -> None:
    template = spec(initContainers=[{"name": "setup", "image": "x"}], containers=[{"name": "sidecar", "image": "x"}])
    for pod in pods(job_with(template, "training")).values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_coordinator_mounts_what_training_pods_mount_but_not_their_sidecars() -> None:
    template = {
        "spec": {
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
            "containers": [
                {"name": "worker", "image": "train:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                {"name": "sidecar", "image": "x"},
            ],
        }
    }
    pod = pods(job_with(template, "training"))["merged-coordinator"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == Images().coordinator
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]


def test_the_coordinator_finds_hub_models_where_the_ranks_find_them() -> None:
    env = [
        {"name": "HF_HOME", "value": "/hub"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "NCCL_DEBUG", "value": "INFO"},
    ]
    coordinator = pods(job_with(worker(env=env), "training"))["merged-coordinator"]
    result = {item["name"]: item for item in coordinator["spec"]["containers"][0]["env"]}
    assert result["HF_HOME"] == env[0]
    assert result["HF_TOKEN"] == env[1]
    assert "NCCL_DEBUG" not in result


def test_groups_of_the_graph_and_their_names() -> None:
    assert list(pods(job_with({}))) == [
        "merged-coordinator",
        "merged-generation-0",
        "merged-inference-0",
        "merged-training-0",
    ]


def test_rendering_leaves_the_job_alone_and_is_repeatable() -> None:
    job = job_with(worker(image="mine:1"))
    before = job.model_dump_json()
    assert render(job, {}).all == render(job, {}).all
    assert job.model_dump_json() == before


def test_null_switches_survive_the_configuration() -> None:
    document = yaml.safe_load(MANIFEST)
    document["spec"]["training"] = {"optimizer": {"maxGradientNorm": None}}
    job = RLHFJob.model_validate(document)
    (configuration,) = [o for o in render(job, {}).supporting if o["kind"] == "ConfigMap"]
    again = RLHFJob.model_validate_json(configuration["data"]["job.json"])
    assert again.spec == job.spec
    assert again.spec.training.optimizer.max_gradient_norm is None


def test_a_reward_function_in_a_configmap_is_mounted_where_it_may_be_scored() -> None:
    document = yaml.safe_load(MANIFEST)
    document["spec"]["models"]["reward"] = {"function": {"configMap": "my-reward"}}
    job = RLHFJob.model_validate(document)
    objects = render(job, {})
    mounted = [
        pod["metadata"]["labels"][LABEL_GROUP]
        for pod in objects.pods
        if {"name": "reward", "configMap": {"name": "my-reward"}} in pod["spec"]["volumes"]
    ]
    assert mounted == ["generation", "inference"]
    (configuration,) = [o for o in objects.supporting if o["kind"] == "ConfigMap"]
    (reward_entry,) = RLHFJob.model_validate_json(configuration["data"]["job.json"]).spec.models.all_rewards
    function = reward_entry.reward.function
    assert function is not None
    assert (function.file, function.config_map) == ("/etc/rlhf/reward/reward.py", None)


def test_an_environment_in_a_configmap_is_mounted_read_only_in_generation_pods_which_hold_no_token() -> None:
    document = yaml.safe_load(MANIFEST)
    document["spec"]["rollout"] = {"environment": {"configMap": "my-game", "name": "Game"}}
    objects = render(RLHFJob.model_validate(document), {})
    volume = {"name": "reward--environment", "configMap": {"name": "my-game"}}
    mounting = [pod for pod in objects.pods if volume in pod["spec"]["volumes"]]
    assert {pod["metadata"]["labels"][LABEL_GROUP] for pod in mounting} == {"generation"}
    for pod in mounting:
        (container,) = (each for each in pod["spec"]["containers"] if each["name"] == "worker")
        mount = {"name": "reward--environment", "mountPath": "/etc/rlhf/reward--environment", "readOnly": True}
        assert mount in container["volumeMounts"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
    (configuration,) = [o for o in objects.supporting if o["kind"] == "ConfigMap"]
    environment = RLHFJob.model_validate_json(configuration["data"]["job.json"]).spec.rollout.environment
    assert environment is not None
    assert (environment.file, environment.config_map, environment.name) == (
        "/etc/rlhf/reward--environment/environment.py",
        None,
        "Game",
    )


def test_the_coordinators_template_adds_to_what_it_has_of_the_training_template() -> None:
    document = yaml.safe_load(MANIFEST)
    data = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    mount = {"name": "data", "mountPath": "/data"}
    container = {"name": "worker", "image": "trainer:1", "volumeMounts": [mount]}
    document["spec"]["training"] = {"template": {"spec": {"containers": [container], "volumes": [data]}}}
    setup = {"name": "setup", "image": "setup:1", "volumeMounts": [mount]}
    own = {
        "nodeSelector": {"pool": "cpu"},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "initContainers": [setup],
        "containers": [{"name": "worker", "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}}}],
    }
    document["spec"]["coordinator"] = {"template": {"metadata": {"labels": {"team": "a"}}, "spec": own}}
    coordinator = pods(RLHFJob.model_validate(document))["merged-coordinator"]
    (worker_,) = coordinator["spec"]["containers"]
    assert worker_["image"] == Images().coordinator, "the training pods' image is not the coordinator's"
    assert worker_["resources"] == {"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    assert mount in worker_["volumeMounts"]
    assert {"data", "scratch", "certificates"} <= {volume["name"] for volume in coordinator["spec"]["volumes"]}
    assert coordinator["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert coordinator["spec"]["initContainers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert coordinator["metadata"]["labels"]["team"] == "a"
    with pytest.raises(TemplateError, match=r"spec\.coordinator\.template\.spec\.hostNetwork"):
        pods(job_with(spec(hostNetwork=True), "coordinator"))


def test_every_container_has_a_tmp_it_can_write_to() -> None:
    mine = {"name": "mine", "mountPath": "/tmp"}
    containers = [
        {"name": "bare"},
        {"name": "own", "volumeMounts": [mine]},
        {"name": "root", "securityContext": {"readOnlyRootFilesystem": False}},
    ]
    pod = generation(spec(initContainers=containers, volumes=[{"name": "mine", "emptyDir": {}}]))
    bare, own, root = pod["spec"]["initContainers"]
    assert bare["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert own["volumeMounts"] == [mine]
    assert "volumeMounts" not in root


def test_pods_of_a_job_without_metrics_ask_not_to_be_scraped() -> None:
    document = job_with({}).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["spec"]["metrics"] = "Disabled"
    for pod in pods(RLHFJob.model_validate(document)).values():
        annotations = pod["metadata"]["annotations"]
        assert {name: value for name, value in annotations.items() if "prometheus" in name} == NOT_SCRAPED
