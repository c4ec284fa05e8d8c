"""Conversion of a template to a pod is strict: defined for any JSON, with precise errors."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.pod_templates import generation, job_with, pods, spec, worker

from rlhf_api.problems import Problem, Severity
from rlhf_common.names import Group
from rlhf_operator.manifests import Images, TemplateError
from rlhf_operator.manifests.pod_problems import problems_of_pods
from rlhf_operator.manifests.pods import worker_pod
from rlhf_operator.manifests.rendering import pod
from rlhf_operator.manifests.template import merge_pod, problems_of

PATH = "spec.generation.template"
JOB = job_with({})
LONGEST = 2000
"""Maximum characters of one problem's message."""

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8)
WORDS = """
metadata spec labels annotations containers initContainers name image env value valueFrom volumes
volumeMounts mountPath resources limits requests claims nvidia.com/gpu cpu memory securityContext
capabilities add ports containerPort hostPort emptyDir projected sources configMap
persistentVolumeClaim claimName nodeSelector tolerations key operator affinity hostNetwork
nodeSelectr worker kind serviceAccountToken
"""
FIELDS = st.sampled_from(WORDS.split())
ANY_JSON = st.recursive(
    SCALARS | st.sampled_from(["worker", "tmp", "1Gi"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=6), inner, max_size=5),
    max_leaves=25,
)


def ours() -> dict[str, Any]:
    return worker_pod(JOB, Group.GENERATION, 0, JOB.spec.generation, "image:1")


def leaves(fields: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the places of all values that are in no list."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, (*place, name))
        elif not isinstance(value, list):
            yield (*place, name)


def inside(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return `value` at a place of nested objects."""
    for name in reversed(place):
        value = {name: value}
    result: dict[str, Any] = value
    return result


OTHER = {
    "fsGroupChangePolicy": "Always",
    "restartPolicy": "Never",
    "terminationMessagePolicy": "File",
    "type": "Unconfined",
    "cpu": "7",
    "memory": "7Gi",
    "path": "/mine",
    "nvidia.com/gpu": "7",
}
"""Field -> valid value that is not ours, where its type does not give one."""


def another(name: str, value: Any) -> Any:
    """Return a valid value of a field that differs from ours."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else OTHER.get(name, "mine")


def at(fields: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        fields = fields[name]
    return fields


def reported(template: dict[str, Any], field: str) -> bool:
    return any(problem.field.startswith(f"{PATH}.{field}") for problem in problems_of(template, PATH, ours()))


@pytest.mark.parametrize("place", list(leaves(ours()["spec"])), ids=".".join)
def test_a_value_of_a_pod_wins_or_is_reported(place: tuple[str, ...]) -> None:
    value = another(place[-1], at(ours()["spec"], place))
    template = spec(**inside(place, value))
    field = ".".join(("spec", *place))
    assert reported(template, field) or at(generation(template)["spec"], place) == value


@pytest.mark.parametrize("place", list(leaves(ours()["spec"]["containers"][0])), ids=".".join)
def test_a_value_of_our_container_wins_or_is_reported(place: tuple[str, ...]) -> None:
    if place == ("name",):
        return  # another name is another container
    value = another(place[-1], at(ours()["spec"]["containers"][0], place))
    template = worker(**inside(place, value))
    field = ".".join(("spec.containers[0]", *place))
    assert reported(template, field) or at(generation(template)["spec"]["containers"][0], place) == value


@pytest.mark.parametrize("name", [each["name"] for each in ours()["spec"]["containers"][0]["env"]])
def test_a_variable_of_our_container_wins_or_is_reported(name: str) -> None:
    template = worker(env=[{"name": name, "value": "mine"}])
    env = {} if (named := reported(template, "spec.containers[0].env[0]")) else variables(generation(template))
    assert named or env[name] == "mine"


def variables(merged: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in merged["spec"]["containers"][0]["env"]}


def test_fields_without_effect_are_warnings_so_that_a_copied_pod_is_accepted() -> None:
    template = spec(enableServiceLinks=True, containers=[{"name": "worker", "terminationMessagePolicy": "File"}])
    problems = problems_of(template, PATH, ours())
    assert {(problem.field, problem.severity) for problem in problems} == {
        (f"{PATH}.spec.enableServiceLinks", Severity.WARNING),
        (f"{PATH}.spec.containers[0].terminationMessagePolicy", Severity.WARNING),
    }
    merged = generation(template)["spec"]
    assert merged["enableServiceLinks"] is False
    assert merged["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_readiness_probe_of_the_coordinator_replaces_ours() -> None:
    probe = {"httpGet": {"path": "/live", "port": 7790}}
    merged = pods(job_with(worker(readinessProbe=probe), "coordinator"))["merged-coordinator"]
    assert merged["spec"]["containers"][0]["readinessProbe"] == probe


def nested(levels: int, kind: str = "map") -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"a": value} if kind == "map" else [value]
    return value


def found(template: Any) -> list[Problem]:
    return list(problems_of(template, PATH, ours()))


@settings(max_examples=1500, deadline=None)
@given(ANY_JSON | st.builds(lambda spec_: {"spec": spec_}, ANY_JSON) | st.builds(lambda c: worker(env=c), ANY_JSON))
def test_any_json_gives_a_pod_or_template_errors(template: Any) -> None:
    errors = [item for item in found(template) if item.severity is Severity.ERROR]
    for problem in errors:
        assert problem.field.startswith(PATH)
        assert problem.message
        assert len(str(problem)) < LONGEST
    if errors:
        with pytest.raises(TemplateError) as refused:
            merge_pod(ours(), template, {"ours": "1"}, PATH)
        assert refused.value.problems == errors
        return
    merged = merge_pod(ours(), template, {"ours": "1"}, PATH)
    json.dumps(merged)
    first = merged["spec"]["containers"][0]
    assert first["name"] == "worker"
    assert first["command"] == ["python", "-m", "rlhf_workers"]
    assert all(
        container["securityContext"]["capabilities"] == {"drop": ["ALL"]} for container in merged["spec"]["containers"]
    )


@pytest.mark.parametrize(
    ("template", "field", "says"),
    [
        ("text", "", "must be a mapping with metadata, spec"),
        (["text"], "", "remove the '-'"),
        ({"spec": 7}, ".spec", "must be a mapping"),
        (spec(containers={"worker": {"image": "x"}}), ".spec.containers", "must be a list, each with '-' before it"),
        (spec(containers=["worker"]), ".spec.containers[0]", "must be a mapping with name"),
        (spec(nodeSelector=["a"]), ".spec.nodeSelector", "must be a mapping of names, each text"),
        (spec(nodeSelector={"gpu": True}), ".spec.nodeSelector.gpu", 'write it in quotes, "true"'),
        (spec(volumes="data"), ".spec.volumes", "must be a list"),
        (worker(resources="4Gi"), ".spec.containers[0].resources", "must be a mapping with claims, limits, requests"),
        (worker(resources={"limits": {"memory": "4GB"}}), ".spec.containers[0].resources.limits.memory", "4G"),
        (worker(env={"A": "b"}), ".spec.containers[0].env", "must be a list"),
        (worker(env=[{"name": "A", "value": 5}]), ".spec.containers[0].env[0].value", 'write it in quotes, "5"'),
        (worker(ports=[{"containerPort": "80"}]), ".spec.containers[0].ports[0].containerPort", "remove the quotes"),
        (worker(image=["x"]), ".spec.containers[0].image", "must be text"),
        (worker(env=[{"value": "x"}]), ".spec.containers[0].env[0].name", "is required in an EnvVar"),
        (spec(volumes=[{"emptyDir": {}}]), ".spec.volumes[0].name", "is required in a Volume"),
        ({"metadata": {"labels": {"a": 1}}}, ".metadata.labels.a", 'write it in quotes, "1"'),
        ({"metadata": {"name": "mine"}}, ".metadata.name", "labels and annotations"),
        ({"kind": "PodTemplate"}, ".kind", "metadata and spec only"),
        (nested(400), "", "nested more than 32 levels deep"),
        (spec(containers=nested(5000, "list")), "", "nested more than 32 levels deep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_malformed_is_told_with_its_path(template: Any, field: str, says: str) -> None:
    problem = found(template)[0]
    assert (problem.field, problem.severity) == (f"{PATH}{field}", Severity.ERROR)
    assert says in problem.message
    assert len(problem.shown_value) <= 80


@pytest.mark.parametrize(
    ("template", "field", "says"),
    [
        (spec(nodeSelectr={"a": "b"}), "nodeSelectr", "did you mean nodeSelector?"),
        (worker(volumeMount=[]), "containers[0].volumeMount", "did you mean volumeMounts?"),
        (worker(nodeSelector={}), "containers[0].nodeSelector", "nodeSelector is a field of a PodSpec"),
        (worker(imagePullPolicy="always"), "containers[0].imagePullPolicy", "did you mean Always?"),
        (spec(tolerations=[{"operator": "Exist"}]), "tolerations[0].operator", "did you mean Exists?"),
        (spec(frobnicate=1), "frobnicate", "an API server that is newer may know it, and decides"),
    ],
)
def test_what_a_newer_kubernetes_may_know_is_its_to_decide(template: Any, field: str, says: str) -> None:
    problem = found(template)[0]
    assert (problem.field, problem.severity) == (f"{PATH}.spec.{field}", Severity.SERVER)
    assert says in problem.message
    generation(template)  # and nothing of it is lost on its way to the API server


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"metadata": {"labels": {"team": "not a label!"}}}, "metadata.labels.team"),
        ({"metadata": {"labels": {"-team": "a"}}}, "metadata.labels"),
        (spec(containers=[{"name": "sidecar"}]), "spec.containers[0].image"),
        (spec(containers=[{"name": "Side_car", "image": "x"}]), "spec.containers[0].name"),
        (spec(containers=[{"name": "a", "image": "x"}, {"name": "a", "image": "x"}]), "spec.containers[1].name"),
        (worker(volumeMounts=[{"name": "gone", "mountPath": "/x"}]), "spec.containers[0].volumeMounts[0].name"),
        (spec(volumes=[{"name": "data"}]), "spec.volumes[0]"),
        (spec(volumes=[{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]), "spec.volumes[1].name"),
        (
            worker(resources={"limits": {"cpu": "1"}, "requests": {"cpu": 2}}),
            "spec.containers[0].resources.requests.cpu",
        ),
        (worker(resources={"limits": {"cpus": "1"}}), "spec.containers[0].resources.limits.cpus"),
        (spec(activeDeadlineSeconds=0), "spec.activeDeadlineSeconds"),
        (spec(tolerations=[{"effect": "NoSchedule"}]), "spec.tolerations[0].operator"),
    ],
)
def test_what_the_api_server_refuses_beyond_its_schema(template: Any, field: str) -> None:
    problem = found(template)[0]
    assert (problem.field, problem.severity) == (f"{PATH}.{field}", Severity.SERVER)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu"])
def test_devices_are_the_manifests_to_ask_for(name: str) -> None:
    [problem] = found(worker(resources={"limits": {name: 1}}))
    assert problem.field == f"{PATH}.spec.containers[0].resources.limits.{name}"
    assert "use spec.generation.gpusPerReplica" in problem.message
    claims = worker(resources={"claims": [{"name": "gpu"}]})
    claims["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "gpu"}]
    [problem] = found(claims | {"metadata": {}})
    assert problem.field == f"{PATH}.spec.containers[0].resources.claims"


def test_problems_of_all_templates_are_told_at_once() -> None:
    job = job_with(spec(volumes="x"))
    training = job.spec.training.model_copy(update={"template": worker(image=1)})
    coordinator = job.spec.coordinator.model_copy(update={"template": "text"})
    spec_ = job.spec.model_copy(update={"training": training, "coordinator": coordinator})
    fields = [problems_of_pod.field for problems_of_pod in problems_of_pods(job.model_copy(update={"spec": spec_}))]
    assert fields == [
        "spec.generation.template.spec.volumes",
        "spec.training.template.spec.containers[0].image",
        "spec.coordinator.template",
    ]


def test_a_list_item_given_twice_is_not_lost_before_the_api_server_sees_it() -> None:
    ports = [{"containerPort": 80, "protocol": "UDP"}, {"containerPort": 80, "protocol": "TCP"}]
    (container,) = generation(worker(ports=ports))["spec"]["containers"]
    assert [port for port in container["ports"] if port["containerPort"] == 80] == ports


def test_a_broken_template_of_the_ranks_stops_the_coordinator_by_name() -> None:
    job = job_with({"spec": {"containers": {"worker": {}}}}, "training")
    with pytest.raises(TemplateError) as refused:
        pod(job, Group.COORDINATOR, 0, Images())
    assert refused.value.problems[0].field == "spec.training.template.spec.containers"
