"""Pods that the API server rejects: one sentence per kind of cause, with the server's message and a remedy."""

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job

from rlhf_api.job import RLHFJob
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.reconcile.refusals import refusal_messages

NAMES = ("job-coordinator", "job-generation-0", "job-generation-1", "job-training-0")


def job() -> RLHFJob:
    parsed = parse_job(stored_job(scheduling={"priorityClassName": "research"}))
    assert parsed.job is not None, parsed.problem
    return parsed.job


KINDS = [
    ("exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1", "free quota in the namespace"),
    (
        "failed quota: team: must specify limits.cpu for: worker; limits.memory for: worker",
        (
            "give the containers that it names these resources in the pod template, or let a LimitRange of namespace "
            "team give defaults"
        ),
    ),
    ("insufficient quota to consume: nvidia.com/gpu", "create a ResourceQuota in namespace team that covers this"),
    (
        "insufficient quota to match these scopes: [{PriorityClass In [research]}]",
        "create a ResourceQuota in namespace team that covers this",
    ),
    ("status unknown for quota: team, resources: pods", "the quota is new: it takes effect in a moment"),
    (
        "no PriorityClass with name research was found",
        ("create it (kubectl get priorityclass lists them), or correct spec.scheduling.priorityClassName"),
    ),
    (
        "no PriorityClass with name other was found",
        ("create it (kubectl get priorityclass lists them), or correct priorityClassName in the pod template"),
    ),
    (
        (
            "the integer value of priority (7) must not be provided in pod spec; priority admission controller "
            "computed 0 from the given PriorityClass name"
        ),
        "remove priority from the pod template",
    ),
    ("maximum memory usage per Container is 1Gi, but limit is 4Gi", "that the LimitRange of the namespace allows"),
    ("minimum cpu usage per Pod is 2.  No request is specified", "that the LimitRange of the namespace allows"),
    (
        "[maximum cpu usage per Container is 1, but limit is 2, maximum memory usage per Pod is 1Gi, but limit is 4Gi]",
        "that the LimitRange of the namespace allows",
    ),
    (
        "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
        "that the LimitRange of the namespace allows",
    ),
    (
        'error looking up service account team/nosuch: serviceaccount "nosuch" not found',
        "create it in namespace team, or correct serviceAccountName in the pod template",
    ),
    (
        (
            'imagePullSecrets[0].name="registry" is not allowed because service account default does not reference '
            "that imagePullSecret"
        ),
        "add it to that service account, or take it out of the pod template",
    ),
    (
        'pod rejected: RuntimeClass "gvisor" not found',
        ("create it (kubectl get runtimeclass lists them), or correct runtimeClassName in the pod template"),
    ),
    (
        "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead",
        "remove overhead from the pod template",
    ),
    (
        "conflict: runtimeClass.scheduling.nodeSelector[a] = b; pod.spec.nodeSelector[a] = c",
        "correct nodeSelector in the pod template",
    ),
    ('violates PodSecurity "restricted:latest": runAsNonRoot != true', "take what it names out of the pod template"),
    (
        "unable to validate against any security context constraint: provider restricted-v2: .spec.x: Forbidden",
        "let the service account of the pod template use a SecurityContextConstraints that allows this",
    ),
    (
        "unable to create new content in namespace team because it is being terminated",
        "create the job in another namespace",
    ),
    (
        "pod node label selector conflicts with its namespace node label selector",
        "correct nodeSelector in the pod template",
    ),
    (
        "pod tolerations (possibly merged with namespace default tolerations) conflict with its namespace whitelist",
        "correct the tolerations in the pod template",
    ),
    (
        (
            'User "system:serviceaccount:rlhf-system:rlhf" cannot create resource "pods" in API group "" in the '
            'namespace "team"'
        ),
        "give the operator this right: upgrade its chart, or correct its roles",
    ),
    (
        "ValidatingAdmissionPolicy 'images' with binding 'images' denied request: use our registry",
        "change what it names in the pod template, or ask the owner of that policy",
    ),
]


def forbidden(name: str, why: str) -> str:
    return f'pods "{name}" is forbidden: {why}'


@pytest.mark.parametrize(("why", "remedy"), KINDS)
def test_a_cause_is_told_once_for_all_pods_with_its_remedy(why: str, remedy: str) -> None:
    [message] = refusal_messages(job(), {name: forbidden(name, why) for name in NAMES})
    assert message.startswith(f"job-coordinator and 3 more cannot be created: {forbidden('job-coordinator', why)}: ")
    assert remedy in message.removeprefix(f"job-coordinator and 3 more cannot be created: {why}")
    assert message.count(why) == 1


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            'admission webhook "images.example.org" denied the request: use our registry',
            "change what it names in the pod template, or ask the owner of that webhook",
        ),
        ('namespaces "team" not found', "create namespace team, or the job in another namespace"),
    ],
)
def test_refusals_that_do_not_name_the_pod_have_a_remedy_too(words: str, remedy: str) -> None:
    [message] = refusal_messages(job(), dict.fromkeys(NAMES, words))
    assert message == f"job-coordinator and 3 more cannot be created: {words}: {remedy}"


def test_words_that_nobody_knows_are_told_once() -> None:
    [message] = refusal_messages(job(), {name: forbidden(name, "the moon is full") for name in NAMES})
    assert (
        message == 'job-coordinator and 3 more cannot be created: pods "job-coordinator" is forbidden: the moon is full'
    )


def test_figures_that_differ_by_group_are_one_cause() -> None:
    [message] = refusal_messages(
        job(),
        {
            name: forbidden(name, f"maximum memory usage per Container is 1Gi, but limit is {number}Gi")
            for number, name in enumerate(NAMES, 2)
        },
    )
    assert message.count("usage per Container") == 1


def test_causes_of_different_kinds_are_told_each_and_no_more_than_three() -> None:
    whys = ["exceeded quota: team", "no PriorityClass with name research was found", "odd", "even"]
    messages = refusal_messages(job(), {name: forbidden(name, why) for name, why in zip(NAMES, whys, strict=True)})
    assert [message.partition(" ")[0] for message in messages] == list(NAMES[:3])


def test_the_phase_of_a_job_shows_the_cause_once() -> None:
    cluster = SimulatedCluster()
    cluster.carry_out(cluster.plan())
    cluster.refusals = {name: forbidden(name, "failed quota: q: must specify limits.cpu for: worker") for name in NAMES}
    cluster.later(11)
    cluster.carry_out(cluster.plan())
    assert cluster.running_message.count("must specify") == 1
