"""A job that grows with Kueue's Workload slices: running pods continue, and growth waits for admission."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster
from tests.support.operator.simulated_cluster import EVERYBODY, stored_job

from rlhf_api.job.scheduling import ELASTIC_ANNOTATION
from rlhf_common import names
from rlhf_operator.gang.kueue_queue import KueueApi
from rlhf_operator.gang.kueue_workload import KueueWorkload
from rlhf_operator.gang.registry import queue_apis
from rlhf_operator.index import Index
from rlhf_operator.stored_job import stored_of

Json = dict[str, Any]
FIRST, SLICE = WORKLOAD_KEY[1], "rlhfslice-job"
QUEUE = next(api for _, api in queue_apis() if api.reads(WORKLOAD_KEY[0]))


def elastic() -> QueuedCluster:
    """Return a running elastic job of a queue."""
    cluster = QueuedCluster()
    cluster.elastic = True
    cluster.settle()
    cluster.admit()
    cluster.begin()
    return cluster


def scale(cluster: QueuedCluster, replicas: int) -> None:
    cluster.job["spec"]["generation"]["replicas"] = replicas
    cluster.job["metadata"]["generation"] += 1
    cluster.later(11)
    cluster.settle()


def count(cluster: QueuedCluster, name: str) -> int:
    sets = cluster.bodies[WORKLOAD_KEY[0], name]["spec"]["podSets"]
    return int(next(item["count"] for item in sets if item["name"] == "generation"))


def replace(cluster: QueuedCluster, old: str, new: str, *, between: bool = False) -> None:
    """Move the reservation of one Workload to another like Kueue; `between` runs the operator in the middle."""
    cluster.condition_of_workload("Finished", "True", "WorkloadSliceReplaced", "replaced.", name=old)
    if between:
        cluster.settle()
        assert not any("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())
    cluster.admit(new)


def test_only_a_job_with_the_annotation_is_elastic() -> None:
    stored: Json = {"metadata": {"annotations": {ELASTIC_ANNOTATION: "true"}}}
    assert KueueApi().state(stored, None, {}).elastic
    for annotations in ({}, {ELASTIC_ANNOTATION: "false"}, None):
        assert not KueueApi().state({"metadata": {"annotations": annotations}}, None, {}).elastic


def test_the_operator_remembers_the_annotation_and_no_other() -> None:
    body = stored_job()
    body["metadata"]["annotations"] = {ELASTIC_ANNOTATION: "true", "note": "x" * 1000, "number": 7}
    metadata = json.loads(stored_of(body).body)["metadata"]
    assert metadata["annotations"] == {ELASTIC_ANNOTATION: "true"}
    body["metadata"]["annotations"] = {ELASTIC_ANNOTATION: True}
    assert "annotations" not in json.loads(stored_of(body).body)["metadata"]


def test_an_elastic_job_asks_by_a_slice_and_keeps_what_runs_meanwhile() -> None:
    cluster = elastic()
    scale(cluster, 3)
    assert cluster.workers == EVERYBODY
    assert cluster.workloads == [FIRST, SLICE]
    assert (count(cluster, FIRST), count(cluster, SLICE)) == (2, 3)
    annotations = cluster.bodies[WORKLOAD_KEY[0], SLICE]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/elastic-job"] == "true"
    assert annotations["kueue.x-k8s.io/workload-slice-replacement-for"] == f"team/{FIRST}"
    cluster.condition_of_workload("QuotaReserved", "False", "Pending", "insufficient quota.", name=SLICE)
    cluster.later(11)
    cluster.settle()
    words = "the job has asked LocalQueue team for all, and keeps its present pods meanwhile: insufficient quota"
    assert cluster.condition("Admitted")["message"].endswith(f"generation stays at 2 of 3 pods: {words}")
    assert cluster.condition("Admitted")["status"] == "True"
    assert cluster.condition("Resizing")["reason"] == "LimitedByQueue"
    scale(cluster, 4)
    assert count(cluster, SLICE) == 4, "one that waits asks for the size of now"


@pytest.mark.parametrize("between", [False, True])
def test_an_admitted_slice_takes_the_place_of_the_workload_and_the_next_one_of_that(between: bool) -> None:
    cluster = elastic()
    pods = set(cluster.pods)
    scale(cluster, 3)
    replace(cluster, FIRST, SLICE, between=between)
    cluster.settle()
    assert set(cluster.pods) == pods | {"job-generation-2"}
    assert cluster.workloads == [SLICE]
    assert cluster.condition("Admitted")["message"] == "LocalQueue team: ClusterQueue gpus has room"
    cluster.begin()
    assert cluster.workload is not None
    assert cluster.workload.conditions["PodsReady"][0] == "True"
    scale(cluster, 4)
    assert cluster.workloads == [SLICE, FIRST]
    replace(cluster, SLICE, FIRST, between=between)
    cluster.settle()
    assert (cluster.workloads, len(cluster.pods)) == ([FIRST], 8)


@pytest.mark.parametrize("sliced", [True, False])
def test_a_job_that_grows_again_quotes_no_workload_that_a_slice_has_replaced(sliced: bool) -> None:
    cluster = elastic()
    scale(cluster, 3)
    if sliced:
        replace(cluster, FIRST, SLICE)
        cluster.condition_of_workload("QuotaReserved", "False", "Pending", "of the old slice.", name=FIRST)
        cluster.statuses[FIRST].pop("admission", None)
    else:
        cluster.admit(SLICE)
    cluster.job["spec"]["generation"]["replicas"] = 4
    status = cluster.plan().status
    assert status is not None
    message = next(each["message"] for each in status["conditions"] if each["type"] == "Admitted")
    words = "the job has asked LocalQueue team for all, and keeps its present pods meanwhile"
    assert message.endswith(f"generation stays at 3 of 4 pods: {words}: Kueue has not looked at it yet")


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_slice_that_waits_for_admission_checks_stays_and_so_do_the_pods(shrinks: bool) -> None:
    cluster = elastic()
    scale(cluster, 3)
    pods = set(cluster.pods)
    cluster.condition_of_workload("Finished", "True", "WorkloadSliceReplaced", "replaced.", name=FIRST)
    cluster.admit(SLICE)
    cluster.condition_of_workload("Admitted", "False", "NoChecks", "a check is not done.", name=SLICE)
    if shrinks:
        scale(cluster, 2)
    cluster.later(11)
    cluster.settle()
    assert cluster.workloads == [FIRST, SLICE]
    assert set(cluster.pods) == pods
    assert cluster.deleting == {}
    admitted = cluster.condition("Admitted")
    assert admitted["status"] == "True"
    assert shrinks or admitted["message"].endswith("keeps its present pods meanwhile: a check is not done")
    cluster.admit(SLICE)
    cluster.settle()
    assert cluster.workloads == [SLICE]
    assert len(cluster.workers) == (6 if shrinks else 7)


def test_a_slice_is_withdrawn_when_the_job_shrinks_again() -> None:
    cluster = elastic()
    scale(cluster, 3)
    scale(cluster, 2)
    assert (cluster.workloads, cluster.workers) == ([FIRST], EVERYBODY)


def test_a_kueue_without_slices_admits_the_slice_beside_the_workload_which_then_goes() -> None:
    cluster = elastic()
    scale(cluster, 3)
    cluster.admit(SLICE)
    cluster.settle()
    assert (cluster.workloads, len(cluster.pods)) == ([SLICE], 7)


@pytest.mark.parametrize("end", ["suspend", "evict", "complete"])
def test_a_job_that_ends_leaves_no_slice_behind(end: str) -> None:
    cluster = elastic()
    scale(cluster, 3)
    cluster.reading = None
    if end == "complete":
        cluster.end("coordinator", 0)
        cluster.settle()
        cluster.finish_deletions()
        cluster.settle()
        for name in (FIRST, SLICE):
            finished = {item["type"]: item["status"] for item in cluster.statuses[name]["conditions"]}
            assert finished["Finished"] == "True"
        return
    if end == "suspend":
        cluster.job["spec"]["suspend"] = True
    else:
        cluster.evict()
    cluster.end_all()
    assert cluster.workloads == ([] if end == "suspend" else [FIRST])
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert count(cluster, FIRST) == 3, "it asks for all anew"


def test_a_job_that_grew_and_is_evicted_waits_by_its_slice() -> None:
    cluster = elastic()
    scale(cluster, 3)
    replace(cluster, FIRST, SLICE)
    cluster.begin()
    cluster.reading = None
    cluster.condition_of_workload("Evicted", "True", "Preempted", "needed.", name=SLICE)
    cluster.end_all()
    assert cluster.workloads == [SLICE]
    assert "admission" not in cluster.statuses[SLICE]
    cluster.admit(SLICE)
    cluster.settle()
    assert len(cluster.workers) == 7


def test_the_index_gives_the_workload_that_counts_and_the_other_one_in_it() -> None:
    cluster = elastic()
    scale(cluster, 3)
    index = Index(lambda *arguments: None, "")
    for name in (SLICE, FIRST):
        assert index.put(WORKLOAD_KEY[0], "team/job", cluster._body(name))
    workload = index.queue_object("team/job", "job-uid", QUEUE)
    assert isinstance(workload, KueueWorkload)
    assert workload.other is not None
    assert (workload.name, workload.other.name) == (FIRST, SLICE)
    later = index.queue_object("team/job", "uid of a later job", QUEUE)
    assert isinstance(later, KueueWorkload)
    assert later.going
    replace(cluster, FIRST, SLICE)
    for name in (FIRST, SLICE):
        index.put(WORKLOAD_KEY[0], "team/job", cluster._body(name))
    workload = index.queue_object("team/job", "job-uid", QUEUE)
    assert isinstance(workload, KueueWorkload)
    assert workload.name == SLICE


MOVES = st.lists(st.sampled_from(["admit", "replace", "evict", "grow", "shrink", "kubelet", "run"]), max_size=14)


@settings(max_examples=40, deadline=None)
@given(MOVES)
def test_whatever_happens_pods_exist_under_a_reservation_that_counts_them(moves: list[str]) -> None:
    cluster = elastic()
    for move in moves:
        admitted = [name for name in cluster.workloads if cluster.statuses.get(name, {}).get("admission")]
        waiting = [name for name in cluster.workloads if name not in admitted]
        if move == "admit" and waiting and not admitted:
            cluster.admit(waiting[0])
        elif move == "replace" and waiting and admitted:
            replace(cluster, admitted[0], waiting[0])
        elif move == "evict" and admitted:
            cluster.condition_of_workload("Evicted", "True", "Preempted", "needed.", name=admitted[0])
        elif move in ("grow", "shrink"):
            now = cluster.job["spec"]["generation"]["replicas"]
            scale(cluster, max(1, min(5, now + (1 if move == "grow" else -1))))
        elif move == "kubelet":
            cluster.finish_deletions()
        elif move == "run":
            cluster.run()
        cluster.settle()
        staying = [body for body in cluster.pods.values() if "deletionTimestamp" not in body["metadata"]]
        if staying:
            assert cluster.workload is not None
            assert cluster.workload.cluster_queue, move
            generation_pods = sum(body["metadata"]["labels"][names.LABEL_GROUP] == "generation" for body in staying)
            assert generation_pods <= cluster.workload.counts["generation"], move
