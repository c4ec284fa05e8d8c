"""10,000 objects that neither an API server nor our processes would send: nothing raises.

No written status is rejected, and the objects next to the bad ones are read.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.manifests.malformed_bodies import CHANGES, VALUES, changed
from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster
from tests.support.operator.simulated_cluster import START, SimulatedCluster
from tests.support.operator.simulated_operator import KEY, SimulatedOperator

from rlhf_api.job.status import RLHFJobStatus
from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_common import control_pb2 as pb
from rlhf_common import names
from rlhf_operator.api_client.client import yaml_of
from rlhf_operator.coordinator_client import reading_of
from rlhf_operator.gang.backend import WorkloadReport
from rlhf_operator.gang.kueue_queue import KueueApi
from rlhf_operator.gang.kueue_workload import flavor_of, priority_value
from rlhf_operator.gang.registry import queue_apis
from rlhf_operator.reconcile import ObservedJob, ObservedPod, pod_of, reconcile
from rlhf_operator.reconcile.observed.termination_log import last_report, readable
from rlhf_operator.untrusted import UnreadableError, UnreadableObject

Json = dict[str, Any]
pytestmark = pytest.mark.usefixtures("silent")
TRIED = {
    "pods": (400, 5),
    "jobs": (500, 1),
    "children": (350, 6),
    "workloads": (150, 3),
    "lines": (400, 10),
    "replies": (250, 4),
}
"""Kind of input -> (examples, objects per example)."""
STATUS_MAX = 64 * 1024
"""Maximum bytes of the status of a job with six pods, including conditions with messages."""


def _bodies(cluster: SimulatedCluster) -> dict[str, Json]:
    """Pods of a job with a long history."""
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-08-22T10:00:05Z", "containerID": "containerd://abc"}
    log = json.dumps({"message": "over", "report": {"iteration": 3, "metrics": {"reward": 0.5}}})
    cluster.end("coordinator", 1, message=log)
    cluster.evict("training-1")
    cluster.wait_with("inference-0", "ImagePullBackOff", "no such image")
    cluster.cannot_schedule("training-0", "0/1 nodes are available")
    cluster.ask_deletion("job-generation-1")
    status = cluster.pods["job-generation-0"]["status"]
    state = {"waiting": {"reason": "PodInitializing"}}
    init = {"name": "fetch", "state": state, "lastState": {"terminated": ended}, "ready": False, "restartCount": 1}
    status["initContainerStatuses"] = [{"name": "first", "state": {"running": {}}}, init]
    status["conditions"] = [{"type": item, "status": "True"} for item in ("Ready", "PodScheduled", "Gpu", "Sick")]
    return copy.deepcopy(cluster.pods)


RUNNING = SimulatedCluster(checkpoints={"path": "/checkpoints", "onDeletion": "Save"}).begin()
JOB = copy.deepcopy(RUNNING.job)
READING = RUNNING.reading
PODS = _bodies(RUNNING)


def _workload() -> tuple[Json, Json]:
    """A job with a queue, and its Workload after admission."""
    cluster = QueuedCluster()
    cluster.settle()
    cluster.admit()
    cluster.settle()
    body = cluster._body()
    update = {"name": "training", "nodeSelector": {"a": "b"}, "tolerations": [{"key": "gpu"}], "labels": {"c": "d"}}
    body["status"]["admissionChecks"] = [{"name": "check", "podSetUpdates": [update]}]
    return copy.deepcopy(cluster.job), body


QUEUED_JOB, WORKLOAD = _workload()
ALL_SERVED = QueuedCluster().served
REPORT = WorkloadReport({"Finished": ("True", "Succeeded", "over")})
CHILD: Json = {
    "metadata": {
        "name": "job-job",
        "namespace": "team",
        "uid": "c1",
        "resourceVersion": "7",
        "labels": {names.LABEL_JOB_NAME: "job"},
        "annotations": {"rlhf.dev/applied": "abc"},
        "ownerReferences": [{"uid": "job-uid", "controller": True}],
    },
    "data": {"job.json": "{}"},
}


@pytest.fixture(scope="module")
def silent() -> Iterator[None]:
    """Silence the log, which would report ten thousand unreadable objects."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def checked(operator: SimulatedOperator, job: Json | None, uid: str, served: Any = None, **more: Any) -> None:
    """Reconcile the input twice, and check that the API server accepts the result."""
    if job is None:
        return
    pods, taken = operator.index.pods(KEY, uid)
    [(_, api)] = queue_apis()
    queue = api.state(job, operator.index.queue_object(KEY, uid, api), {})
    for attempt in range(2):
        observed = ObservedJob(
            pods=pods,
            taken=taken,
            unreadable=operator.index.unreadable(KEY, uid),
            ended=operator.index.ended(KEY, uid),
            applied=operator.index.applied(KEY, uid),
            certificates_expire=START + timedelta(days=200),
            queue=queue,
            **({"served": served} if served else {}),
            **more,
        )
        plan = reconcile(job, observed, START + timedelta(seconds=20 * (attempt + 1)))
        operator.metrics.see(job, observed, plan)
        for event in plan.events:
            event.message.encode(errors="replace")
        if plan.status is None:
            return
        text = json.dumps(plan.status, allow_nan=False)
        assert len(text) < STATUS_MAX
        yaml_of({"status": plan.status}).decode()
        RLHFJobStatus.model_validate(plan.status)
        job = {**job, "status": json.loads(text)}


def loaded(job: Json = JOB) -> SimulatedOperator:
    operator = SimulatedOperator()
    operator.sees(names.KIND, job)
    return operator


@pytest.mark.full
@settings(max_examples=TRIED["pods"][0])
@given(st.permutations(sorted(PODS)), st.lists(CHANGES, min_size=5, max_size=5))
def test_pods(order: list[str], changes: list[list[tuple[int, int]]]) -> None:
    operator, bad = loaded(), dict(zip(order, changes, strict=False))
    bodies = {name: changed(body, bad.get(name, [])) for name, body in PODS.items()}
    for body in bodies.values():
        assert isinstance(pod_of(body), ObservedPod | UnreadableObject)
        operator.sees("Pod", body, "ADDED")
    ours, _ = operator.index.pods(KEY, "job-uid")
    assert ours.get(order[-1]) == pod_of(PODS[order[-1]]), "the pod beside them is read"
    checked(operator, operator.index.job(KEY), "job-uid", reading=READING)
    for body in bodies.values():
        operator.sees("Pod", body, "DELETED")
    checked(operator, operator.index.job(KEY), "job-uid", reading=READING)


@pytest.mark.full
@settings(max_examples=TRIED["jobs"][0])
@given(CHANGES, st.booleans())
def test_jobs(changes: list[tuple[int, int]], deleting: bool) -> None:
    operator = SimulatedOperator()
    body = changed(JOB, changes)
    if deleting and isinstance(body.get("metadata"), dict):
        gone = {"deletionTimestamp": "2026-08-22T10:00:00Z", "finalizers": [names.FINALIZER]}
        body["metadata"] = gone | body["metadata"]
    operator.sees(names.KIND, body)
    for item in PODS.values():
        operator.sees("Pod", item)
    assert len(operator.index.pods(KEY, "job-uid")[0]) == len(PODS)
    for key in operator.index.jobs():
        result = operator.index.job(key)
        assert result is not None
        checked(operator, result, str(result["metadata"]["uid"]), reading=READING)
    _shown(body)
    operator.sees(names.KIND, body, "DELETED")


def _shown(body: Json) -> None:
    """Read the object like `rlhf list`, which skips objects without a name."""
    if not isinstance(body.get("metadata"), dict):
        return
    job = ClusterJob(body)
    json.dumps([job.phase, job.iterations, job.iteration, job.seconds_left, job.finished, job.last_log, job.state])


@pytest.mark.full
@settings(max_examples=TRIED["children"][0])
@given(st.lists(CHANGES, min_size=6, max_size=6))
def test_other_children(changes: list[list[tuple[int, int]]]) -> None:
    operator = loaded()
    for kind in ("ConfigMap", "Service", "NetworkPolicy"):
        for item in (changes.pop(), changes.pop()):
            body = changed(CHILD, item)
            for event in (None, "MODIFIED", "DELETED"):
                operator.sees(kind, body, event)
    operator.sees("Service", CHILD | {"metadata": CHILD["metadata"] | {"uid": "c2", "name": "job"}})
    assert ("Service", "job") in operator.index.applied(KEY, "job-uid")
    checked(operator, operator.index.job(KEY), "job-uid")


@settings(max_examples=TRIED["workloads"][0])
@given(CHANGES)
def test_workloads_and_what_they_name(changes: list[tuple[int, int]]) -> None:
    operator = loaded(QUEUED_JOB)
    body = changed(WORKLOAD, changes)
    operator.sees(WORKLOAD_KEY[0], body)
    checked(operator, operator.index.job(KEY), "job-uid", served=ALL_SERVED, reading=READING)
    operator.sees(WORKLOAD_KEY[0], body, "DELETED")
    readers: list[tuple[Callable[[Json], Any], Json]] = [
        (flavor_of, {"spec": {"nodeLabels": {"a": "b"}, "tolerations": [{"key": "a"}]}}),
        (priority_value, {"value": 5}),
        (lambda each: KueueApi().with_report(each, REPORT, "2026-08-22T10:00:00Z"), WORKLOAD),
    ]
    for reader, good in readers:
        try:
            reader(changed(good, changes))
        except UnreadableError as error:
            assert len(str(error)) < 1000  # noqa: PT017 any other error fails


def _lines() -> Iterator[str]:
    for item in VALUES:
        value = item() if callable(item) else item
        try:
            text = json.dumps({"report": {"iteration": value, "checkpoint": value, "metrics": {"reward": value}}})
            yield text
            yield json.dumps({"message": value, "traceback": value, "report": value})
            yield json.dumps({"report": {"iteration": 3, "metrics": value}})
        except (TypeError, RecursionError, ValueError):
            continue


LINES = [*_lines(), "[" * 2000, '{"a":' * 2000, '{"report": {"iteration": 1e400}}', 'cut, "message": "\\q"}', '"}', "{"]


@pytest.mark.full
@settings(max_examples=TRIED["lines"][0])
@given(
    st.lists(st.sampled_from(LINES) | st.text(max_size=80), min_size=10, max_size=10),
    st.integers(0, 60),
    st.sampled_from(["coordinator", "training-0"]),
)
def test_last_lines(lines: list[str], cut: int, worker: str) -> None:
    log = "\n".join(lines)[cut:]
    result = readable(log)
    result.encode()
    assert len(result) <= 1000
    last_report(log)
    operator, body = loaded(), copy.deepcopy(PODS[f"job-{worker}"])
    ended = {"exitCode": 20, "message": log, "finishedAt": "2026-08-22T10:00:05Z"}
    body["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]
    body["status"]["phase"] = "Running"
    operator.sees("Pod", body)
    assert operator.index.unreadable(KEY, "job-uid") == ()
    checked(operator, operator.index.job(KEY), "job-uid", reading=READING)


NUMBERS = st.sampled_from([0, 1, -1, 7, 2**31 - 1, -(2**31)])
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1e300, -1e308, float("nan"), float("inf"), float("-inf")])
TEXTS = st.sampled_from(
    ["", "reward", "generation", "Generating", "x" * 5000, "²", "a/iteration-" + "9" * 4000, "\x00"]
)


@st.composite
def replies(draw: st.DrawFn) -> pb.JobStatus:
    """Generate a status that a coordinator's process might send."""
    status = pb.JobStatus(
        phase=draw(TEXTS),
        iteration=draw(NUMBERS),
        iterations=draw(NUMBERS),
        last_checkpoint=draw(TEXTS),
        seconds_left=draw(FLOATS),
        metrics=draw(st.dictionaries(st.sampled_from(["reward", "kl", "samples_per_second", "²"]), FLOATS)),
        replicas=draw(st.dictionaries(TEXTS, NUMBERS, max_size=2)),
        waiting_for=[draw(TEXTS)] * draw(st.sampled_from([0, 1, 1000])),
        pool=[draw(TEXTS), "generation-1"] * draw(st.sampled_from([0, 1, 1000])),
        workers=[pb.WorkerStatus(worker=draw(TEXTS), state=draw(TEXTS)), pb.WorkerStatus(worker="x-1", state="Ready")],
    )
    status.fusion.MergeFrom(
        pb.FusionStatus(choice=draw(TEXTS), threshold=draw(NUMBERS), predicted_seconds=draw(FLOATS))
    )
    return status


@pytest.mark.full
@settings(max_examples=TRIED["replies"][0])
@given(st.lists(replies(), min_size=4, max_size=4))
def test_status_replies(statuses: list[pb.JobStatus]) -> None:
    # As they come by the wire.
    read = [reading_of(pb.JobStatus.FromString(item.SerializeToString()), START) for item in statuses]
    operator = loaded()
    for entry in PODS.values():
        operator.sees("Pod", entry)
    for reading in read[:2]:
        checked(operator, operator.index.job(KEY), "job-uid", reading=reading)


def test_these_are_ten_thousand() -> None:
    assert sum(examples * objects for examples, objects in TRIED.values()) >= 10_000
