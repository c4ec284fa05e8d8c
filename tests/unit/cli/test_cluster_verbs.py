"""Requests, refusals and waits of the cluster commands, and their messages for errors of an API server."""

import json
from pathlib import Path

import pytest
from kubernetes.aio.client.configuration import Configuration
from tests.support.operator.seen_job import load

from rlhf_api.job.status import RLHFJobStatus
from rlhf_api.problems import ManifestError
from rlhf_cli.cluster import spec_change
from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_cli.cluster.cluster_session import ClusterSession, ConnectionFlags, run
from rlhf_cli.cluster.errors import VerbError, explained
from rlhf_cli.cluster.wait import parse_duration, parse_goal, unattainable, wait_result
from rlhf_common.names import Group
from rlhf_operator.api_client.connection import Connection, ConnectionConfigError, find_connection
from rlhf_operator.api_client.errors import ForbiddenError, UnavailableError, error_of
from rlhf_operator.api_client.resources import CORE_RESOURCES
from rlhf_operator.api_client.transport import ApiRequest, unanswered
from rlhf_operator.reconcile.failures.failure_policy import VERDICTS

CONNECTION = Connection(Configuration(host="https://server:6443"), "prod", "alice", "default")


JOBS, PODS = CORE_RESOURCES["RLHFJob"], CORE_RESOURCES["Pod"]


def job(state: str = "running") -> ClusterJob:
    return ClusterJob(load(state)["job"])


def test_scale_sends_only_what_changes_and_says_from_what_to_what() -> None:
    change = spec_change.scale(job(), {Group.GENERATION: 4, Group.INFERENCE: 1})
    assert change.patch == {"spec": {"generation": {"replicas": 4}}}
    assert change.announcement == "is scaled: generation 2 -> 4"
    assert spec_change.scale(job(), {Group.GENERATION: 2}).patch == {}
    assert "when it is resumed" in spec_change.scale(job("suspended"), {Group.INFERENCE: 3}).announcement


def test_a_size_against_the_rules_is_refused_in_their_words_and_old_problems_are_not() -> None:
    with pytest.raises(ManifestError, match=r"spec\.generation\.replicas"):
        spec_change.scale(job(), {Group.GENERATION: 9999})
    strange = load("running")
    strange["job"]["spec"]["fieldOfALaterVersion"] = 1
    assert spec_change.scale(ClusterJob(strange["job"]), {Group.GENERATION: 4}).patch


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["generation"], "such as generation=4"),
        (["generation=many"], "such as generation=4"),
        (["generation=-1"], "such as generation=4"),
        (["training=2"], "spec.training.parallelism"),
        (["coordinator=2"], "generation and inference can be scaled"),
        (["generation=1", "generation=2"], "occurs twice"),
    ],
)
def test_what_is_no_size_is_refused_by_name(texts: list[str], message: str) -> None:
    with pytest.raises(VerbError, match=message) as refused:
        spec_change.parse_sizes(texts)
    assert refused.value.exit_code == 2


def test_suspend_and_resume_change_one_field_and_nothing_twice() -> None:
    assert spec_change.suspend(job()).patch == {"spec": {"suspend": True}}
    assert "saves a checkpoint" in spec_change.suspend(job()).announcement
    assert spec_change.suspend(job("suspended")).patch == {}
    assert spec_change.resume(job("suspended")).announcement == "will be resumed from iteration 164"
    assert spec_change.resume(job()).patch == {}
    with pytest.raises(VerbError, match="bad is Failed and cannot be resumed"):
        spec_change.resume(job("failed"))


def test_a_job_without_checkpoints_is_told_to_begin_anew_before_and_after() -> None:
    running, suspended = job(), job("suspended")
    for each in (running, suspended):
        each.body["spec"].pop("checkpoints")
    assert (
        "checkpoints is not set, so it will start from the beginning when it is resumed"
        in spec_change.suspend(running).announcement
    )
    assert (
        spec_change.resume(suspended).announcement
        == "will start from the beginning, because spec.checkpoints is not set"
    )


@pytest.mark.parametrize(
    ("goal", "state", "code"),
    [
        ("condition=Complete", "running", None),
        ("condition=running", "running", 0),
        ("condition=Running=False", "suspended", 0),
        ("condition=Complete", "failed", 22),
        ("condition=Failed", "failed", 0),
        ("phase=Suspended", "suspended", 0),
        ("phase=running", "failed", 22),
        ("phase=Running", "suspended", None),
        ("iteration=100", "running", 0),
        ("iteration=99999", "running", None),
        ("delete", "failed", None),
    ],
)
def test_a_wait_ends_as_soon_as_its_end_is_decided(goal: str, state: str, code: int | None) -> None:
    verdict = wait_result(parse_goal(goal), job(state))
    assert (verdict.code if verdict else None) == code
    if code == 22:
        assert verdict is not None
        assert "BadPrompts" in verdict.message


@pytest.mark.parametrize("exit_code", sorted(VERDICTS))
def test_a_wait_for_a_failed_job_ends_with_the_exit_code_of_its_coordinator(exit_code: int) -> None:
    body = load("failed")["job"]
    failed = next(condition for condition in body["status"]["conditions"] if condition["type"] == "Failed")
    failed["reason"] = VERDICTS[exit_code].value
    verdict = wait_result(parse_goal("condition=Complete"), ClusterJob(body))
    assert verdict is not None
    assert verdict.code == exit_code


def test_a_job_that_goes_away_or_completes_otherwise_ends_a_wait() -> None:
    gone = wait_result(parse_goal("iteration=3"), None)
    assert gone is not None
    assert (gone.code, gone.message) == (1, "was deleted while iteration=3 was waited for")
    deleted = wait_result(parse_goal("delete"), None)
    assert deleted is not None
    assert deleted.code == 0
    complete = load("running")["job"]
    complete["status"]["conditions"][5]["status"] = "True"
    verdict = wait_result(parse_goal("phase=Suspended"), ClusterJob(complete))
    assert verdict is not None
    assert verdict.message == "is Complete, so phase=Suspended will never hold"
    assert "has 100000 iterations" in unattainable(parse_goal("iteration=100001"), job())


def test_a_job_without_status_is_waited_for() -> None:
    body = load("running")["job"]
    del body["status"]
    assert wait_result(parse_goal("phase=Pending"), ClusterJob(body)) is None
    assert wait_result(parse_goal("condition=Complete=False"), ClusterJob(body)) is None


@pytest.mark.parametrize("text", ["condition=Done", "phase=Up", "iteration=x", "Complete", "condition=Complete=Maybe"])
def test_what_cannot_be_waited_for_is_refused(text: str) -> None:
    with pytest.raises(VerbError, match="--for"):
        parse_goal(text)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "5m", "1h30m", "2h")] == [90, 90, 300, 5400, 7200]
    for wrong in ("", "soon", "5 m", "-1"):
        with pytest.raises(VerbError, match="--timeout"):
            parse_duration(wrong)


def status_of(code: int, message: str, **details: str) -> bytes:
    return json.dumps({"kind": "Status", "code": code, "message": message, "details": details}).encode()


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (
            403,
            status_of(403, 'rlhfjobs.rlhf.dev is forbidden: User "bob" cannot list resource "rlhfjobs"'),
            "user bob may not list rlhfjobs.rlhf.dev in namespace team: ask for the ClusterRole view",
        ),
        (404, b"404 page not found\n", "context prod does not know RLHFJob (rlhf.dev/v1alpha1): install the operator"),
        (401, status_of(401, "Unauthorized"), "does not accept the credentials of prod"),
        (422, status_of(422, "spec.seed: fixed"), "spec.seed: fixed"),
        (503, b"upstream", "could not answer"),
        (404, status_of(404, 'rlhfjobs.rlhf.dev "x" not found', name="x"), "is not there"),
    ],
)
def test_a_refusal_of_the_api_server_says_what_would_help(code: int, content: bytes, words: str) -> None:
    assert words in str(refusal(code, content, ApiRequest("list", JOBS, "team")))


def refusal(code: int, content: bytes, request: ApiRequest) -> Exception:
    return explained(error_of(code, content, str(request)), request, CONNECTION)


def test_rights_on_subresources_and_changes_name_the_role_that_has_them() -> None:
    log, change = ApiRequest("get", PODS, "team", "a", "log"), ApiRequest("patch", JOBS, None, "a")
    assert "you may not get pods/log in namespace team: ask for the ClusterRole view" in str(refusal(403, b"{}", log))
    words = "patch rlhfjobs.rlhf.dev in all namespaces: ask for the ClusterRole edit by a clusterrolebinding"
    assert words in str(refusal(403, b"{}", change))
    assert isinstance(refusal(403, b"", ApiRequest("get", PODS)), ForbiddenError)


def test_a_server_that_does_not_answer_is_named() -> None:
    request = ApiRequest("list", JOBS)
    silent = explained(unanswered(request, TimeoutError()), request, CONNECTION)
    assert isinstance(silent, UnavailableError)
    assert "https://server:6443 (context prod) cannot be reached: no answer in time" in str(silent)
    stranger = explained(unanswered(request, OSError("certificate verify failed")), request, CONNECTION)
    assert "fetch the kubeconfig anew" in str(stranger)


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://server:6443"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [
        {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        {"name": "two", "context": {"cluster": "c", "user": "u"}},
    ],
    "current-context": "one",
}


async def test_the_namespace_is_that_of_the_context(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(json.dumps(KUBECONFIG))
    assert (await find_connection(path)).namespace == "team"
    other = await find_connection(path, "two")
    assert (other.namespace, other.context, other.configuration.host) == ("default", "two", "https://server:6443")


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        (json.dumps(KUBECONFIG), "three", "'three' is not in"),
        (json.dumps(KUBECONFIG | {"current-context": ""}), None, "give --context, one of one, two"),
        ("- a list", None, "is no kubeconfig"),
        ("a: b: c", None, "cannot be used"),
        ("", None, "is no kubeconfig"),
    ],
)
async def test_an_unusable_kubeconfig_is_one_summarize(
    tmp_path: Path, content: str, context: str | None, words: str
) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(ConnectionConfigError, match=words):
        await find_connection(path, context)


def test_a_verb_without_a_way_to_a_cluster_ends_as_wrong_usage(tmp_path: Path) -> None:
    async def verb(session: ClusterSession) -> int:
        raise AssertionError("there is no session")

    with pytest.raises(VerbError, match="there is no such file") as refused:
        run(ConnectionFlags(kubeconfig=tmp_path / "none"), verb)
    assert refused.value.exit_code == 2


async def test_no_kubeconfig_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))
    with pytest.raises(ConnectionConfigError, match="KUBECONFIG names"):
        await find_connection()
    with pytest.raises(ConnectionConfigError, match="--kubeconfig"):
        await find_connection(tmp_path / "gone")


def test_the_fixtures_are_of_this_version_of_the_contract() -> None:
    for state in ("running", "failed", "suspended"):
        RLHFJobStatus.model_validate(load(state)["job"]["status"])
