"""The API server's verdict on pods: requested once per template before creation, and reported as a condition."""

import copy
from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job

from rlhf_operator.api_client.errors import ConflictError, InvalidError, RefusedError, UnavailableError
from rlhf_operator.manifests import Images
from rlhf_operator.pod_dry_run import Trials
from rlhf_operator.reconcile import ObservedPod, pod_of
from rlhf_operator.reconcile.phases import DRY_RUN_RETRY_SECONDS

TYPO = {"spec": {"nodeSelectr": {"zone": "a"}}}
WORDS = 'strict decoding error: unknown field "spec.nodeSelectr"'


class TrialServer:
    """Accepts pods, or raises the configured error."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.answers: dict[str, Exception] = {}

    async def try_to_create(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        self.tried.append(name)
        for part, error in self.answers.items():
            if part in name:
                raise error


class TrialClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> TrialServer:
    return TrialServer()


@pytest.fixture
def clock() -> TrialClock:
    return TrialClock()


@pytest.fixture
def trials(server: TrialServer, clock: TrialClock) -> Trials:
    return Trials(server, Images(), clock)  # type: ignore[arg-type]


async def test_every_template_is_tried_once_and_not_by_every_job(trials: Trials, server: TrialServer) -> None:
    job = stored_job(generation={"replicas": 500})
    assert await trials.verdict("team/job", job, {}) == ""
    assert server.tried == ["job-coordinator", "job-generation-0", "job-inference-0", "job-training-0"]
    for turn in range(3):
        assert await trials.verdict("team/job", job, {}) == "", turn
    twin = copy.deepcopy(job)
    twin["metadata"] |= {"name": "twin", "uid": "another"}
    assert await trials.verdict("team/twin", twin, {}) == ""
    assert len(server.tried) == 4
    elsewhere = copy.deepcopy(job)
    elsewhere["metadata"] |= {"namespace": "other", "uid": "third"}
    await trials.verdict("other/job", elsewhere, {})
    assert len(server.tried) == 8, "another namespace may refuse what this one takes"


async def test_a_template_is_not_tried_when_pods_were_made_from_it(trials: Trials, server: TrialServer) -> None:
    cluster = SimulatedCluster().begin()
    pods = {pod.name: pod for body in cluster.pods.values() if isinstance(pod := pod_of(body), ObservedPod)}
    assert await trials.verdict("team/job", cluster.job, pods) == ""
    assert server.tried == []
    cluster.job["spec"]["inference"]["template"] = {"spec": {"nodeSelector": {"zone": "a"}}}
    cluster.job["metadata"]["generation"] += 1
    await trials.verdict("team/job", cluster.job, pods)
    assert server.tried == ["job-inference-0"]


async def test_a_refusal_names_the_template_and_the_nearest_right_name(
    trials: Trials, server: TrialServer, clock: TrialClock
) -> None:
    server.answers["generation"] = InvalidError(WORDS)
    job = stored_job(generation={"replicas": 2, "template": TYPO})
    words = await trials.verdict("team/job", job, {})
    assert words.startswith(f"spec.generation.template: the API server refuses its pods: {WORDS}")
    assert "did you mean nodeSelector?" in words
    asked = len(server.tried)
    assert await trials.verdict("team/job", job, {}) == words
    assert len(server.tried) == asked
    clock.now += DRY_RUN_RETRY_SECONDS
    server.answers.clear()
    assert await trials.verdict("team/job", job, {}) == "", "an administrator may have mended it"
    job["spec"]["generation"]["template"] = {"spec": {"frobnicate": 1}}
    job["metadata"]["generation"] += 1
    server.answers["generation"] = InvalidError("no frobnicate")
    assert "no frobnicate" in await trials.verdict("team/job", job, {}), "an edit is tried at once"


@pytest.mark.parametrize(
    "answer",
    [
        ConflictError("exists"),
        RefusedError("exceeded quota"),
        UnavailableError("no answer"),
        InvalidError('admission webhook "x" does not support dry run'),
    ],
)
async def test_what_says_nothing_about_the_template_is_no_verdict(
    trials: Trials, server: TrialServer, answer: Exception
) -> None:
    server.answers["job"] = answer
    assert await trials.verdict("team/job", stored_job(), {}) == ""


async def test_templates_that_are_refused_for_one_reason_are_told_together_with_the_remedy(
    trials: Trials, server: TrialServer
) -> None:
    for group in ("coordinator", "generation", "inference", "training"):
        name = "job-coordinator" if group == "coordinator" else f"job-{group}-0"
        denied = f"pods \"{name}\" is forbidden: ValidatingAdmissionPolicy 'images' denied request: use our registry"
        server.answers[group] = InvalidError(denied)
    words = await trials.verdict("team/job", stored_job(), {})
    assert words == (
        "spec.coordinator.template, spec.generation.template, spec.inference.template, spec.training.template: the API "
        "server refuses its pods: pods \"job-coordinator\" is forbidden: ValidatingAdmissionPolicy 'images' denied "
        "request: use our registry: change what it names in the pod template, or ask the owner of that policy"
    )


async def test_what_is_known_to_be_malformed_is_not_asked(trials: Trials, server: TrialServer) -> None:
    assert await trials.verdict("team/job", stored_job(training={"template": "text"}), {}) == ""
    assert server.tried == []


def test_a_refused_template_starts_nothing_and_is_told() -> None:
    cluster = SimulatedCluster()
    cluster.dry_run_problem = f"spec.generation.template: the API server refuses its pods: {WORDS}"
    plan = cluster.settle()
    assert cluster.pods == {}
    assert cluster.applied == {}
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"], planned["message"]) == (
        "False",
        "PodsRefused",
        cluster.dry_run_problem,
    )
    assert cluster.running_message == f"nothing was started: {cluster.dry_run_problem}"
    assert cluster.events == ["PodsRefused"]
    assert plan.requeue_after is not None
    assert plan.requeue_after <= DRY_RUN_RETRY_SECONDS
    cluster.dry_run_problem = ""
    cluster.settle()
    assert len(cluster.pods) == 6


def test_pods_of_a_running_job_are_not_replaced_by_a_template_that_is_refused() -> None:
    cluster = SimulatedCluster().begin()
    cluster.job["spec"]["generation"]["template"] = TYPO
    cluster.dry_run_problem = f"spec.generation.template: the API server refuses its pods: {WORDS}"
    cluster.settle()
    assert all("deletionTimestamp" not in body["metadata"] for body in cluster.pods.values())
    assert cluster.phase == "Running"
