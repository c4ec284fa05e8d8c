"""Malformed input from a tenant affects only its own object: nothing raises, and its job reports it."""

import copy
import json
from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job
from tests.support.operator.simulated_operator import KEY, SimulatedOperator

from rlhf_common import names
from rlhf_operator.reconcile import ObservedJob, ObservedPod, pod_of
from rlhf_operator.reconcile.diagnostics import names_taken
from rlhf_operator.reconcile.observed.observed_pod import PodEnd
from rlhf_operator.reconcile.observed.termination_log import last_report, readable
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.untrusted import UnreadableObject

Json = dict[str, Any]


def pod(name: str = "job-generation-0", *, owner: str = "job-uid", version: str = "5", **labels: str) -> Json:
    all_labels = {names.LABEL_JOB_NAME: "job", names.LABEL_GROUP: "generation", names.LABEL_INDEX: "0"}
    all_labels |= {f"rlhf.dev/{each}": value for each, value in labels.items()}
    meta: Json = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-of-{name}",
        "resourceVersion": version,
        "labels": all_labels,
    }
    if owner:
        meta["ownerReferences"] = [{"uid": owner, "controller": True, "kind": "RLHFJob", "name": "job"}]
    return {"metadata": meta, "status": {"phase": "Running"}}


def with_status(**status: Any) -> Json:
    return pod() | {"status": {"phase": "Running"} | status}


def ended(message: Any, **more: Any) -> Json:
    state = {"terminated": {"exitCode": 1, "message": message} | more}
    return with_status(containerStatuses=[{"name": "worker", "state": state}])


def test_a_container_whose_command_cannot_be_run_is_read_though_its_start_is_of_1970() -> None:
    words = 'failed to create containerd task: exec: "rlhf-worker": executable file not found in $PATH'
    terminated = {"exitCode": 128, "reason": "StartError", "message": words, "containerID": "containerd://1"}
    times = {"startedAt": "1970-01-01T00:00:00Z", "finishedAt": "2026-08-22T10:00:00Z"}
    state = {"waiting": {"reason": "RunContainerError", "message": words}}
    container = {"name": "worker", "restartCount": 1, "state": state, "lastState": {"terminated": terminated | times}}
    read = pod_of(with_status(containerStatuses=[container]))
    assert isinstance(read, ObservedPod)
    assert read.began is None
    assert read.end is not None
    assert (read.end.code, read.end.reason) == (128, "StartError")
    assert words in read.waiting_message


BAD_LABELS = ["abc", "²", "-1", "1.5", "٣", "9" * 5000, "0x10", "1e400", " 1"]


@pytest.mark.parametrize("value", BAD_LABELS)
@pytest.mark.parametrize("label", ["epoch", "index"])
def test_a_label_that_is_no_number_costs_its_pod_alone(label: str, value: str) -> None:
    operator = SimulatedOperator()
    operator.sees("Pod", pod(**{label: value}))
    operator.sees("Pod", pod("job-generation-1", index="1"))
    ours, taken = operator.index.pods(KEY, "job-uid")
    assert list(ours) == ["job-generation-1"]
    assert taken == {"job-generation-0"}, "its name is taken, or another would be made again and again"
    ((kind, result),) = operator.index.unreadable(KEY, "job-uid")
    assert (kind, result.name) == ("Pod", "job-generation-0")
    assert f"metadata.labels[rlhf.dev/{label}]" in result.why
    assert len(result.why) < 300
    assert operator.counted("Pod") == 1


STRANGE_STATUS: list[tuple[str, Json]] = [
    ("status is a list of 1", {"status": [1]}),
    ("status.conditions.0.type is null", {"status": {"conditions": [{"type": None}]}}),
    ("status.conditions.0.type", {"status": {"conditions": [{"status": "True"}]}}),
    ("status.conditions.0 is 7", {"status": {"conditions": [7]}}),
    ("status.containerStatuses is an object of 1", {"status": {"containerStatuses": {"worker": {}}}}),
    ("status.containerStatuses.0.state", {"status": {"containerStatuses": [{"name": "worker", "state": [1]}]}}),
    ("exitCode", {"status": {"containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": "x"}}}]}}),
    ("status.podIP is 5", {"status": {"podIP": 5}}),
]


@pytest.mark.parametrize(("place", "change"), STRANGE_STATUS, ids=[place for place, _ in STRANGE_STATUS])
def test_a_status_of_another_shape_is_told_with_its_place(place: str, change: Json) -> None:
    result = pod_of(pod() | change)
    assert isinstance(result, UnreadableObject)
    assert place in result.why
    assert (result.name, result.owner, result.version) == ("job-generation-0", "job-uid", 5)


def test_times_and_graces_that_no_clock_has_are_bounded() -> None:
    result = pod_of(pod() | {"metadata": pod()["metadata"] | {"deletionTimestamp": "0001-01-01T00:00:00+14:00"}})
    assert isinstance(result, UnreadableObject)
    assert "deletionTimestamp" in result.why
    going = {"deletionTimestamp": "2026-08-22T10:00:00Z", "deletionGracePeriodSeconds": 2**63 - 1}
    observed = pod_of(pod() | {"metadata": pod()["metadata"] | going})
    assert isinstance(observed, ObservedPod)
    assert observed.deletion_asked is not None


LOGS = {
    "a word for a number": '{"report": {"iteration": "final"}}',
    "a list for a map": '{"report": {"iteration": 3, "metrics": [1]}}',
    "numbers beyond a float": '{"report": {"iteration": 3, "metrics": {"reward": 1e400, "kl": NaN}}}',
    "a number of 5,000 digits": '{"report": {"iteration": ' + "9" * 5000 + "}}",
    "a metric of 400 digits": '{"report": {"iteration": 3, "metrics": {"reward": ' + "9" * 400 + "}}}",
    "no whole number": '{"report": {"iteration": 1.5}}',
    "2,000 levels": "[" * 2000,
    "2,000 levels in a line": '{"message": ' + "[" * 2000 + "]" * 2000 + "}",
    "half of a pair": '{"message": "\\ud83d"}',
    "half of a pair in the pod": "the end: \ud83d",
    "an escape that is none": 'ends with "message": "\\q"}',
    "a megabyte": "x" * 1_000_000,
    "a list": "[1]",
    "another type": '{"message": {"a": 1}, "traceback": 3, "report": []}',
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_whatever_user_code_prints_last_is_read_or_left(log: str) -> None:
    result = pod_of(ended(log))
    assert isinstance(result, ObservedPod)
    assert result.end is not None
    result.end.message.encode()
    assert len(result.end.message) <= 1000
    report = last_report(log)
    assert report is None or all(abs(value) < 1e301 for value in report.metrics.values())


def test_what_is_right_in_a_report_is_kept() -> None:
    result = last_report('{"report": {"iteration": 3, "metrics": {"reward": 0.5, "kl": 1e400, "note": "x"}}}')
    assert result is not None
    assert (result.iteration, dict(result.metrics)) == (3, {"reward": 0.5})


def test_the_words_of_a_line_are_those_of_its_text_alone() -> None:
    assert readable('{"message": {"a": [1, 2]}}') == "an object of 1"
    assert readable('{"message": "\\ud83d!"}') == "?!"


def test_a_last_message_that_is_no_text_is_no_crash() -> None:
    result = pod_of(ended({"a": 1}))
    assert isinstance(result, ObservedPod)
    assert isinstance(result.end, PodEnd)


def test_a_pod_with_our_labels_that_the_job_does_not_control_is_nobody_to_it() -> None:
    """Anyone may set a label: a coordinator with it that 'completed' does not complete the job."""
    cluster, operator = SimulatedCluster().begin(), SimulatedOperator()
    operator.sees(names.KIND, cluster.job)
    for body in cluster.pods.values():
        operator.sees("Pod", body)
    before = operator.index.pods(KEY, "job-uid")
    uid = {"job-uid": "job-uid", "group": "coordinator", "index": "0"}
    imposter = pod("imposter", owner="", **uid) | {"status": {"phase": "Succeeded"}}
    operator.sees("Pod", imposter)
    operator.sees("Pod", pod("other", owner="another-uid", **uid))
    ours, taken = operator.index.pods(KEY, "job-uid")
    assert ours == before[0]
    assert taken == {"imposter", "other"}
    assert operator.index.unreadable(KEY, "job-uid") == ()


def test_a_pod_of_the_job_that_cannot_be_read_is_told_once_and_not_replaced() -> None:
    cluster = SimulatedCluster().begin()
    cluster.pods["job-generation-0"]["metadata"]["labels"][names.LABEL_EPOCH] = "abc"
    cluster.later(11)
    cluster.events.clear()
    for _ in range(3):
        cluster.settle()
        cluster.later(11)
        cluster.read()
    assert "job-generation-0" in cluster.pods
    assert cluster.events.count("Unreadable") == 1
    message = cluster.running_message
    assert 'Pod job-generation-0 cannot be read (metadata.labels[rlhf.dev/epoch] is "abc"' in message
    cluster.pods["job-generation-0"]["metadata"]["labels"][names.LABEL_EPOCH] = "0"
    cluster.settle()
    assert "cannot be read" not in cluster.running_message


def test_a_suspended_job_leaves_no_pod_that_cannot_be_read() -> None:
    cluster = SimulatedCluster(checkpoints={"path": "/checkpoints"}).begin()
    cluster.pods["job-generation-0"]["metadata"]["labels"][names.LABEL_INDEX] = "first"
    cluster.job["spec"]["suspend"] = True
    for _ in range(4):
        cluster.settle()
        cluster.finish_deletions()
    assert cluster.pods == {}


def test_the_name_of_a_pod_that_somebody_else_has_is_told() -> None:
    cluster, operator = SimulatedCluster(), SimulatedOperator()
    operator.sees("Pod", pod("job-coordinator", owner=""))
    cluster.settle()
    del cluster.pods["job-coordinator"]
    cluster.taken = operator.index.pods(KEY, "job-uid")[1]
    cluster.later(11)
    cluster.settle()
    assert "job-coordinator: a pod of this name is not this job's" in cluster.running_message


def nested(levels: int) -> Any:
    result: Any = 1
    for _ in range(levels):
        result = {"a": result}
    return result


def test_a_manifest_of_ten_thousand_levels_is_refused_in_words() -> None:
    operator, body = SimulatedOperator(), stored_job()
    body["spec"]["generation"]["template"] = nested(9990)
    operator.sees(names.KIND, body)
    result = operator.index.job(KEY)
    assert result is not None
    admission = parse_job(result)
    assert not admission.planned
    assert "spec.generation.template.a.a" in admission.problem
    assert "nested more than 64 levels deep" in admission.problem
    assert operator.counted(names.KIND) == 1
    body["metadata"]["resourceVersion"] = "2"
    body["spec"]["generation"]["template"] = {}
    operator.sees(names.KIND, body)
    mended = operator.index.job(KEY)
    assert mended is not None
    assert parse_job(mended).planned


STATUSES: list[tuple[str, Any]] = [
    ("no type", {"conditions": [{"status": "True"}]}),
    ("a map for a list", {"conditions": {"Running": "True"}}),
    ("a text", "done"),
    ("deep", nested(500)),
    ("a word for a number", {"groups": [{"name": "generation", "desired": "two", "ready": 0}]}),
    ("an unknown group", {"groups": [{"name": "x", "desired": 1, "ready": 0}]}),
    ("a number for a time", {"startTime": 5, "completionTime": "yesterday"}),
    ("restarts", {"restarts": {"failures": "many", "accounted": [{"pod": 1}]}}),
    ("a huge number", {"restarts": {"failures": 10**30}}),
    ("progress", {"progress": [1, 2]}),
]


@pytest.mark.parametrize("status", [each for _, each in STATUSES], ids=[name for name, _ in STATUSES])
def test_a_status_that_no_operator_wrote_is_written_anew(status: Any) -> None:
    operator, cluster = SimulatedOperator(), SimulatedCluster()
    operator.sees(names.KIND, cluster.job | {"status": status})
    result = operator.index.job(KEY)
    assert result is not None
    cluster.job = result
    cluster.begin()
    assert cluster.phase == "Running"
    assert operator.counted(names.KIND) == 1


def test_one_condition_that_is_wrong_does_not_make_a_finished_job_run_again() -> None:
    cluster, operator = SimulatedCluster().begin(), SimulatedOperator()
    cluster.end("coordinator", 0)
    cluster.settle()
    cluster.finish_deletions()
    before, body = sorted(cluster.pods), copy.deepcopy(cluster.job)
    body["status"]["conditions"].insert(0, {"type": 3})
    body["metadata"]["resourceVersion"] = "9"
    operator.sees(names.KIND, body)
    result = operator.index.job(KEY)
    assert result is not None
    cluster.job = result
    cluster.settle()
    assert cluster.condition("Complete")["status"] == "True"
    assert sorted(cluster.pods) == before


NO_OBJECTS: list[Any] = [
    None,
    [],
    {},
    {"metadata": None},
    {"metadata": {"labels": [1]}},
    {"metadata": {"name": 1, "namespace": "team", "labels": {names.LABEL_JOB_NAME: "job"}}},
    {"metadata": {"name": "x", "namespace": "team", "uid": "u", "resourceVersion": "x", "labels": {}}},
    {"metadata": {"name": "x", "namespace": "team", "uid": "u", "resourceVersion": "²", "labels": {}}},
    nested(9990),
]


@pytest.mark.parametrize("body", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
@pytest.mark.parametrize("event", [None, "ADDED", "DELETED"])
def test_no_event_stops_a_stream(event: Any, body: Any) -> None:
    operator = SimulatedOperator()
    for kind in (names.KIND, "Pod", "Service", "ConfigMap"):
        labelled = body
        if isinstance(body, dict) and isinstance(body.get("metadata"), dict):
            labelled = {"metadata": {"labels": {names.LABEL_JOB_NAME: "job"}} | body["metadata"]}
        operator.sees(kind, labelled, event)
        operator.events.take(kind, {"type": event})
    operator.sees("Pod", pod())
    assert list(operator.index.pods(KEY, "job-uid")[0]) == ["job-generation-0"]


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "networking.k8s.io/v1/NetworkPolicy"])
def test_an_unreadable_object_that_is_no_pod_is_reported_until_it_is_read_or_gone(kind: str) -> None:
    operator, right = SimulatedOperator(), pod("job-coordinator")
    wrong = pod("job-coordinator", version="6")
    wrong["metadata"] |= {"deletionTimestamp": "yesterday", "finalizers": ["example.org/keep"]}
    operator.sees(kind, pod("job-coordinator", version="4"))
    operator.sees(kind, wrong)
    operator.sees(kind, wrong)
    ((found, result),) = operator.index.unreadable(KEY, "job-uid")
    assert (found, result.name) == (kind.rpartition("/")[2], "job-coordinator")
    assert "metadata.deletionTimestamp" in result.why
    assert operator.counted(found) == 1
    operator.sees(kind, right)
    assert operator.index.unreadable(KEY, "job-uid"), "an earlier version"
    assert operator.index.put(kind, KEY, pod("job-coordinator", version="7")), "the job is to hear of it"
    assert operator.index.unreadable(KEY, "job-uid") == ()
    wrong["metadata"]["resourceVersion"] = "8"
    operator.sees(kind, wrong)
    operator.sees(kind, wrong, "DELETED")
    operator.sees(kind, wrong)
    assert operator.index.unreadable(KEY, "job-uid") == ()


def test_an_unreadable_service_hides_no_pod_of_another_with_its_name() -> None:
    job = parse_job(stored_job()).job
    assert job is not None
    service = ("Service", UnreadableObject("job-coordinator", "u", 1, "job-uid", "no time"))
    assert names_taken(job, ObservedJob(unreadable=(service,), taken=frozenset({"job-coordinator"})))


def test_the_parser_of_a_stream_takes_what_the_api_server_stores() -> None:
    """10,000 levels are the server's own limit; an unparsable event would end the whole listing."""
    import sys

    from rlhf_operator.untrusted import PARSER_LEVELS

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(PARSER_LEVELS)
    try:
        json.loads('{"a":' * 9_999 + "1" + "}" * 9_999)
    finally:
        sys.setrecursionlimit(before)
