"""A gang requests as much as the scheduler counts for its pods, with any form of their templates."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from tests.support.operator.quota_templates import POD_SPECS, kueue_counts, most_at_once
from tests.support.operator.simulated_cluster import stored_job

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.gang import ServedApis, choose
from rlhf_operator.gang.members import examples, quota_template
from rlhf_operator.gang.pod_requests import pod_requests
from rlhf_operator.manifests.quantity import amount, written
from rlhf_operator.reconcile.parsed_job import parse_job

Json = dict[str, Any]
SIDECAR: Json = {
    "name": "proxy",
    "image": "proxy",
    "restartPolicy": "Always",
    "resources": {"requests": {"cpu": "2"}},
}


def job(template: Json, mode: str = "Kueue") -> RLHFJob:
    """Return a job whose generation pods are made from this template."""
    stored = stored_job(
        generation={"replicas": 1, "template": {"spec": template}},
        inference={"replicas": 0},
        scheduling={"gang": {"mode": mode}},
    )
    stored["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    parsed = parse_job(stored)
    assert parsed.job is not None, parsed.problem
    return parsed.job


def worker(**resources: Any) -> Json:
    return {"name": "worker", "resources": resources}


def asked(template: Json) -> dict[str, str]:
    """Return the resources that Kueue counts for one generation pod."""
    rlhf_job = job(template)
    pod_set = quota_template(rlhf_job, Group.GENERATION, examples(rlhf_job)[Group.GENERATION])
    return {name: written(value) for name, value in kueue_counts(pod_set["spec"]).items() if value}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            {"initContainers": [SIDECAR], "containers": [worker(requests={"cpu": "4", "memory": "1Gi"})]},
            {"cpu": "6", "memory": "1073741824"},
        ),
        (
            # An init container runs beside the sidecars that were started before it, and not beside later ones.
            {
                "initContainers": [
                    SIDECAR,
                    {"name": "fetch", "image": "fetch", "resources": {"requests": {"cpu": "5"}}},
                    {**SIDECAR, "name": "shipper"},
                ],
                "containers": [worker(requests={"cpu": "1", "memory": "1Gi"})],
            },
            {"cpu": "7", "memory": "1073741824"},
        ),
        (
            {
                "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "4Gi"}},
                "containers": [worker(requests={"cpu": "1", "memory": "1Gi"})],
            },
            {"cpu": "8", "memory": "1073741824"},
        ),
        (
            {
                "resources": {"limits": {"cpu": "8", "hugepages-2Mi": "64Mi", "memory": "4Gi"}},
                "containers": [worker(requests={"cpu": "1", "memory": "1Gi"})],
            },
            {"cpu": "1", "memory": "1073741824", "hugepages-2Mi": "67108864"},
        ),
        (
            {
                "runtimeClassName": "gvisor",
                "overhead": {"cpu": "500m", "memory": "64Mi"},
                "initContainers": [SIDECAR],
                "containers": [worker(limits={"cpu": "1", "memory": "1Gi"})],
            },
            {"cpu": "3500m", "memory": "1140850688"},
        ),
    ],
)
def test_a_pod_set_asks_for_what_its_pods_take(template: Json, expected: dict[str, str]) -> None:
    assert asked(template) == expected


@pytest.mark.parametrize("mode", ["Volcano", "Coscheduling"])
def test_a_pod_group_asks_for_sidecars_pod_level_resources_and_overhead(mode: str) -> None:
    template = {
        "overhead": {"cpu": "1"},
        "resources": {"requests": {"memory": "8Gi"}},
        "initContainers": [SIDECAR],
        "containers": [worker(requests={"cpu": "4", "memory": "1Gi"})],
    }
    rlhf_job = job(template, mode)
    served = ServedApis(frozenset(["scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1"]))
    [group] = choose(rlhf_job, served).backend.objects(rlhf_job, examples(rlhf_job))
    others = {Group.COORDINATOR: 1, Group.TRAINING: 2}
    expected = {"cpu": Decimal(7), "memory": amount("8Gi")}
    for other, count in others.items():
        for name, value in pod_requests(examples(rlhf_job)[other]["spec"]).items():
            expected[name] += count * value
    assert {name: amount(value) for name, value in group["spec"]["minResources"].items()} == expected


@settings(max_examples=300, deadline=None)
@given(POD_SPECS)
def test_a_pod_asks_for_the_most_that_runs_at_once(spec: Json) -> None:
    assert pod_requests(spec) == most_at_once(spec)


@settings(max_examples=300, deadline=None)
@given(POD_SPECS)
def test_kueue_counts_from_a_pod_set_what_the_scheduler_counts_from_the_pod(spec: Json) -> None:
    template = quota_template(job({}), Group.GENERATION, {"metadata": {}, "spec": spec})
    assert {name: value for name, value in kueue_counts(template["spec"]).items() if value} == {
        name: value for name, value in pod_requests(spec).items() if value
    }
