"""Objects of each backend for a job: golden files, fields of pods, and the choice of the backend."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.queued_cluster import EVERY_API
from tests.support.operator.simulated_cluster import stored_job

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import PlannedReason
from rlhf_common.names import Group
from rlhf_operator.gang import ServedApis, choose
from rlhf_operator.gang.apis import MODES, RESOURCES, kind_of
from rlhf_operator.gang.members import examples, min_count, minimum
from rlhf_operator.gang.none import NoGangBackend
from rlhf_operator.manifests.quantity import amount, written
from rlhf_operator.manifests.rendering import Images, pod, workers
from rlhf_operator.reconcile.parsed_job import parse_job

Json = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
OWNER = {"apiGroup": "rlhf.dev", "kind": "RLHFJob", "name": "job"}


def job(queue: str | None = None, **spec: Any) -> RLHFJob:
    """The job of the operator's other tests: 2 generation, 1 inference, 2 training workers."""
    stored = stored_job(**spec)
    if queue:
        stored["metadata"]["labels"] = {QUEUE: queue}
    admitted = parse_job(stored)
    assert admitted.job is not None, admitted.problem
    return admitted.job


def served(*versions: str, off: tuple[str, ...] = ()) -> ServedApis:
    return ServedApis(frozenset(versions), frozenset(off))


def gang(mode: str, **more: Any) -> Json:
    return {"scheduling": {"gang": {"mode": mode, **more}}}


def rendered(each: RLHFJob, cluster: ServedApis) -> tuple[dict[str, Json], Json]:
    """Return specs of the gang's objects by kind, and its first generation pod."""
    choice = choose(each, cluster)
    assert choice.backend is not None, choice
    objects = choice.backend.objects(each, examples(each))
    for body in objects:
        assert kind_of(body) in RESOURCES
        assert body["metadata"]["ownerReferences"][0]["name"] == "job"
        assert body["metadata"]["labels"]["rlhf.dev/job-name"] == "job"
    plain = pod(each, Group.GENERATION, 0, Images())
    joined = choice.backend.join(each, plain)
    assert plain == pod(each, Group.GENERATION, 0, Images()), "the pod that was given is changed"
    return {f"{body['apiVersion']}/{body['kind']}": body["spec"] for body in objects}, joined


def test_a_gang_is_what_an_iteration_cannot_do_without() -> None:
    assert minimum(job()) == {Group.COORDINATOR: 1, Group.GENERATION: 1, Group.INFERENCE: 1, Group.TRAINING: 2}
    big = job(generation={"replicas": 64}, inference={"replicas": 0})
    assert minimum(big) == {Group.COORDINATOR: 1, Group.GENERATION: 1, Group.TRAINING: 2}


def test_native_of_1_35_has_its_groups_in_the_workload() -> None:
    objects, member = rendered(job(), served("scheduling.k8s.io/v1alpha1"))
    groups = [{"name": "job", "policy": {"gang": {"minCount": 5}}}]
    assert objects == {"scheduling.k8s.io/v1alpha1/Workload": {"controllerRef": OWNER, "podGroups": groups}}
    assert member["spec"]["workloadRef"] == {"name": "job", "podGroup": "job"}
    assert "schedulingGroup" not in member["spec"]


def test_native_of_1_36_has_a_pod_group_of_its_own() -> None:
    objects, member = rendered(job(), served("scheduling.k8s.io/v1alpha1", "scheduling.k8s.io/v1alpha2"))
    policy = {"gang": {"minCount": 5}}
    assert objects == {
        "scheduling.k8s.io/v1alpha2/Workload": {
            "controllerRef": OWNER,
            "podGroupTemplates": [{"name": "job", "schedulingPolicy": policy}],
        },
        "scheduling.k8s.io/v1alpha2/PodGroup": {
            "podGroupTemplateRef": {"workload": {"workloadName": "job", "podGroupTemplateName": "job"}},
            "schedulingPolicy": policy,
        },
    }
    assert member["spec"]["schedulingGroup"] == {"podGroupName": "job"}
    assert "workloadRef" not in member["spec"]


def test_native_of_1_37_names_the_template_otherwise_and_knows_priority() -> None:
    priority: Json = {"scheduling": {"priorityClassName": "research"}}
    objects, member = rendered(job(**priority), EVERY_API)
    policy: Json = {"schedulingPolicy": {"gang": {"minCount": 5}}, "priorityClassName": "research"}
    assert objects == {
        "scheduling.k8s.io/v1beta1/Workload": {
            "controllerRef": OWNER,
            "podGroupTemplates": [{"name": "job", **policy}],
        },
        "scheduling.k8s.io/v1beta1/PodGroup": {"workloadRef": {"workloadName": "job", "templateName": "job"}, **policy},
    }
    assert member["spec"]["schedulingGroup"] == {"podGroupName": "job"}
    assert "priorityClassName" not in str(rendered(job(**priority), served("scheduling.k8s.io/v1alpha2"))[0])


def test_volcano_gets_members_resources_queue_and_its_scheduler() -> None:
    spec: Json = {"scheduling": {"gang": {"mode": "Volcano", "queue": "research"}, "priorityClassName": "high"}}
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 8, "gpusPerReplica": 1}
    objects, member = rendered(job(training=training, **spec), EVERY_API)
    assert objects["scheduling.volcano.sh/v1beta1/PodGroup"] == {
        "minMember": 5,
        "minResources": {"cpu": "5", "memory": "4831838208", "nvidia.com/gpu": "2"},
        "queue": "research",
        "priorityClassName": "high",
    }
    assert member["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "job"
    assert member["spec"]["schedulerName"] == "volcano"


def test_coscheduling_gets_a_label_and_its_scheduler() -> None:
    objects, member = rendered(job(**gang("Coscheduling", timeoutSeconds=120)), EVERY_API)
    group = objects["scheduling.x-k8s.io/v1alpha1/PodGroup"]
    assert (group["minMember"], group["scheduleTimeoutSeconds"]) == (5, 120)
    assert member["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "job"
    assert member["metadata"]["labels"]["rlhf.dev/job-name"] == "job"
    assert member["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def test_a_schedulers_own_name_is_taken_from_the_template_that_gives_it_for_all_pods() -> None:
    named = job(training={"template": {"spec": {"schedulerName": "ours"}}}, **gang("Coscheduling"))
    assert rendered(named, EVERY_API)[1]["spec"]["schedulerName"] == "ours"


@pytest.mark.parametrize(
    ("spec", "queue", "cluster", "expected"),
    [
        ({}, None, served(), "Disabled"),
        ({}, None, EVERY_API, "Native"),
        ({}, "team", EVERY_API, "Kueue"),
        ({}, "team", ServedApis(frozenset(["scheduling.k8s.io/v1beta1"]), ignores_labels=True), "Native"),
        (gang("Disabled"), "team", EVERY_API, "Disabled"),
        ({}, None, served("scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1"), "Disabled"),
        ({"generation": {"template": {"spec": {"schedulerName": "volcano"}}}}, None, EVERY_API, "Volcano"),
        (
            {"training": {"template": {"spec": {"schedulerName": "scheduler-plugins-scheduler"}}}},
            None,
            EVERY_API,
            "Coscheduling",
        ),
        ({"generation": {"template": {"spec": {"schedulerName": "somebody"}}}}, None, EVERY_API, "Disabled"),
        ({}, None, ServedApis(EVERY_API.apis, frozenset(["Native"])), "Disabled"),
        (gang("Kueue"), "team", served("kueue.x-k8s.io/v1beta1"), "Kueue"),
    ],
)
def test_auto_takes_the_queue_then_the_scheduler_that_is_named_then_kubernetes_own(
    spec: Json, queue: str | None, cluster: ServedApis, expected: str
) -> None:
    choice = choose(job(queue, **spec), cluster)
    assert choice.problem == ""
    assert choice.backend.mode == expected


def test_a_label_that_nobody_reads_keeps_the_job_waiting_and_says_how_to_go_on() -> None:
    label = "the label kueue.x-k8s.io/queue-name: team asks for a queue"
    choice = choose(job("team"), served("scheduling.k8s.io/v1beta1"))
    assert choice.waits == (
        f"{label}, and the cluster does not serve kueue.x-k8s.io/v1beta2 or kueue.x-k8s.io/v1beta1: install Kueue, or "
        "remove the label to start without quota. The operator's administrator can let jobs start despite such "
        "labels: scheduling.ignoreQueueLabels: true in the values of its chart"
    )
    assert choice.problem == ""
    off = choose(job("team"), ServedApis(EVERY_API.apis, frozenset(["Kueue"])))
    assert off.waits.startswith(f"{label}, and this operator may not use it: set scheduling.kueue: true")


def test_a_label_may_be_ignored_where_the_operator_says_so_and_is_told() -> None:
    choice = choose(job("team"), ServedApis(ignores_labels=True))
    assert choice.waits == ""
    assert "the label kueue.x-k8s.io/queue-name: team has no effect: the cluster does not serve" in choice.note


@pytest.mark.parametrize("mode", ["Disabled", "Native", "Volcano", "Coscheduling"])
def test_a_label_that_the_manifest_overrules_is_told(mode: str) -> None:
    choice = choose(job("team", **gang(mode)), EVERY_API)
    assert (choice.waits, choice.backend.mode) == ("", mode)
    expected = f"the label kueue.x-k8s.io/queue-name: team has no effect with spec.scheduling.gang.mode: {mode}"
    assert choice.note == expected
    assert choose(job(**gang(mode)), EVERY_API).note == ""


@pytest.mark.parametrize("mode", MODES)
def test_a_backend_asked_by_name_that_is_not_there_is_a_problem_with_its_remedy(mode: str) -> None:
    asked = job("team", **gang(mode))
    missing = choose(asked, served())
    assert missing.reason == PlannedReason.NOT_SERVED
    assert missing.problem.startswith(f"spec.scheduling.gang.mode: {mode}: the cluster does not serve ")
    switched = choose(asked, ServedApis(EVERY_API.apis, frozenset([mode])))
    assert f"scheduling.{mode.lower()}: true" in switched.problem


def test_kueue_without_a_queue_and_two_schedulers_for_one_gang_are_refused() -> None:
    assert QUEUE in choose(job(**gang("Kueue")), EVERY_API).problem
    two: Json = {
        "generation": {"template": {"spec": {"schedulerName": "a"}}},
        "training": {"template": {"spec": {"schedulerName": "b"}}},
    }
    refused = choose(job(**two, **gang("Volcano")), EVERY_API)
    assert refused.reason == PlannedReason.INVALID
    assert "a, b" in refused.problem
    assert choose(job(**two), EVERY_API).backend == NoGangBackend()


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1Gi", "1073741824"), ("1.5G", "1500000000"), ("1e3", "1000"), ("12E", "12e18")],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: str) -> None:
    assert amount(text) == Decimal(value)


def test_what_is_no_quantity_is_named() -> None:
    with pytest.raises(ValueError, match="'many' is not a quantity"):
        amount("many")


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_written_sum_is_never_less_than_the_sum(milli: int, micro: int) -> None:
    total = amount(f"{milli}m") + amount(f"{micro}u")
    assert 0 <= amount(written(total)) - total < Decimal("0.001")


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4))
def test_the_minimum_never_exceeds_the_pods_that_the_job_wants(generation: int, inference: int, ranks: int) -> None:
    result = job(
        generation={"replicas": generation},
        inference={"replicas": inference},
        training={"parallelism": {"pipeline": ranks}, "microBatchSize": 8},
    )
    assert min_count(result) <= 1 + sum(count for _, count, _ in workers(result))
