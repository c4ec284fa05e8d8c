"""Repeated pod replacement is slowed down for every cause of the pods' ends."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.simulated_cluster import START, SimulatedCluster

from rlhf_api.user_patterns import pattern_found
from rlhf_operator.reconcile import ObservedPod, pod_of
from rlhf_operator.reconcile.failures.pod_back_off import LONGEST, RAN_WELL, delay

LIMIT = 1000
FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". '
SICK = "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc failed, which is unexpected"
PRESSED = "Pod was rejected: The node had condition: [DiskPressure]. "


def job(*rules: dict[str, Any], limit: int = LIMIT, **spec: Any) -> SimulatedCluster:
    return SimulatedCluster(runPolicy={"backoffLimit": limit, "failurePolicy": {"rules": list(rules)}}, **spec).begin()


def uid(cluster: SimulatedCluster, worker: str = "generation-1") -> str | None:
    body = cluster.pods.get(cluster.name(worker))
    return body["metadata"]["uid"] if body else None


def creation_seconds(
    cluster: SimulatedCluster, seconds: float, ends: list[Any], worker: str = "generation-1", step: float = 1.0
) -> list[float]:
    """Return the seconds at which a pod was created, if each of its pods ends as the next of `ends` once it is up."""
    begun, at, seen, left = cluster.now, [], uid(cluster, worker), iter(ends)
    while (cluster.now - begun).total_seconds() < seconds:
        cluster.turn()
        if uid(cluster, worker) not in (seen, None):
            seen = uid(cluster, worker)
            at.append((cluster.now - begun).total_seconds())
        body = cluster.pods.get(cluster.name(worker))
        if body and body["status"]["phase"] == "Pending":
            cluster.run(worker)
        elif body and body["status"]["phase"] == "Running" and (end := next(left, None)):
            end(cluster, worker)
        cluster.later(step)
    return at


def sick(cluster: SimulatedCluster, worker: str) -> None:
    cluster.fail(worker, "UnexpectedAdmissionError", SICK)


def full(cluster: SimulatedCluster, worker: str) -> None:
    cluster.fail(worker, "Evicted", FULL, killed=True)


def drained(cluster: SimulatedCluster, worker: str) -> None:
    cluster.evict(worker)


def deleted(cluster: SimulatedCluster, worker: str) -> None:
    cluster.ask_deletion(cluster.name(worker))


def restarts(cluster: SimulatedCluster, worker: str) -> None:
    cluster.end(worker, 75, restarted=False)


def done(cluster: SimulatedCluster, worker: str) -> None:
    cluster.end(worker, 0)
    cluster.pods[cluster.name(worker)]["status"]["phase"] = "Succeeded"


def fabric(cluster: SimulatedCluster, worker: str) -> None:
    cluster.end(worker, 4)


def crashes(cluster: SimulatedCluster, worker: str) -> None:
    cluster.end(worker, 1, restarted=False)


ENDS = [sick, full, drained, deleted, restarts, done, fabric, crashes]
CIRCLE = {"name": "fabric", "action": "Ignore", "scope": "Job", "onExitCodes": {"values": [4]}}


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("end", [sick, full, drained, deleted], ids=lambda end: end.__name__)
def test_a_place_whose_pods_end_at_once_gets_three_pods_in_25_seconds_and_not_52(end: Any) -> None:
    cluster = job()
    at = creation_seconds(cluster, 25, [end] * 60, step=0.25)
    assert 2 <= len(at) <= 3, at
    reported = cluster.running_message
    assert (
        "before it creates job-generation-1 again, because job-generation-1 ended 3 times in a row, the last time: "
        in reported
    )
    assert "(20 s after the last creation)" in reported


def test_the_first_replacement_is_made_at_once_and_the_others_ever_later() -> None:
    assert [delay(ends).total_seconds() for ends in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert delay(10**6) == LONGEST


def test_a_pod_that_ran_well_begins_anew() -> None:
    cluster = job()
    creation_seconds(cluster, 30, [drained] * 3)
    cluster.later(60)
    cluster.turn()
    cluster.run()
    cluster.later(RAN_WELL.total_seconds())
    cluster.settle()
    assert cluster.job["status"]["restarts"]["backOff"] == []
    cluster.evict("generation-1")
    before = uid(cluster)
    cluster.turn()
    assert uid(cluster) not in (before, None), "the first replacement is made at once"


def test_a_restarted_operator_waits_as_long_and_no_longer() -> None:
    cluster = job()
    creation_seconds(cluster, 12, [sick] * 9, step=0.25)
    assert uid(cluster) is None
    cluster.written = None  # what a process knows beside the status
    [place] = cluster.job["status"]["restarts"]["backOff"]
    cluster.now = datetime.fromisoformat(place["until"]) - timedelta(seconds=3)
    cluster.turn()
    assert uid(cluster) is None
    assert (cluster.plan().requeue_after or 99) <= 3
    cluster.later(3)
    cluster.turn()
    assert uid(cluster) is not None


def test_another_template_is_tried_at_once() -> None:
    cluster = job()
    creation_seconds(cluster, 12, [sick] * 9, step=0.25)
    assert uid(cluster) is None
    cluster.job["spec"]["generation"]["template"] = {"metadata": {"annotations": {"cured": "yes"}}}
    cluster.job["metadata"]["generation"] = 2
    cluster.turn()
    assert uid(cluster) is not None


def test_a_suspension_begins_anew() -> None:
    cluster = job()
    creation_seconds(cluster, 12, [sick] * 9, step=0.25)
    cluster.job["spec"]["suspend"] = True
    for _ in range(3):
        cluster.turn()
    cluster.job["spec"]["suspend"] = False
    cluster.turn()
    assert uid(cluster) is not None
    assert cluster.job["status"]["restarts"]["backOff"] == []


@pytest.mark.full
@settings(max_examples=5)
@given(st.lists(st.sampled_from(ENDS), min_size=20, max_size=40), st.sampled_from(["generation-1", "training-0"]))
def test_whatever_ends_its_pods_a_place_gets_few_of_them_an_hour(ends: list[Any], worker: str) -> None:
    cluster = job(CIRCLE)
    at = creation_seconds(cluster, 3600, ends, worker, step=15.0)
    assert len(at) <= 7 + 12
    for number, moment in enumerate(at):
        within = [item for item in at[number:] if item - moment < RAN_WELL.total_seconds()]
        assert len(within) <= 7, (moment, at)


# -- whose fault it was


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("Evicted", FULL, (1, 0)),
        ("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ", (1, 0)),
        ("Evicted", "Container worker exceeded its local ephemeral storage limit", (1, 0)),
        ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline", (1, 0)),
        ("SysctlForbidden", 'Pod was rejected: forbidden sysctl: "kernel.x" not allowlisted', (1, 0)),
        ("AppArmor", "Pod was rejected: Cannot enforce AppArmor", (1, 0)),
        ("PodOSNotSupported", "Pod was rejected: Failed to admit pod as the OS field", (1, 0)),
        ("SomethingNew", "of a later Kubernetes", (1, 0)),
        ("Evicted", PRESSED, (0, 1)),
        ("UnexpectedAdmissionError", SICK, (0, 1)),
        ("OutOfnvidia.com/gpu", "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu", (0, 1)),
        ("OutOfcpu", "Pod was rejected: Node didn't have enough resource: cpu", (0, 1)),
        ("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed", (0, 1)),
        ("TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality", (0, 1)),
        ("NodeShutdown", "Pod was rejected as the node is shutting down.", (0, 1)),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", (0, 1)),
    ],
)
def test_an_end_is_the_nodes_or_the_pods_own_and_the_kubelets_words_stay(
    reason: str, message: str, expected: tuple[int, int]
) -> None:
    cluster = job()
    cluster.fail("generation-1", reason, message, killed=not message.startswith("Pod was rejected"))
    cluster.turn()
    assert cluster.counts == expected
    last_reason = cluster.job["status"]["restarts"]["lastReason"]
    assert last_reason.startswith("job-generation-1: ")
    assert f"{reason}: {message.strip()}" in last_reason
    cluster.settle()
    assert cluster.counts == expected, "looked at twice"


def test_an_eviction_for_its_own_limit_counts_towards_the_backoff_limit() -> None:
    cluster = job(limit=2)
    creation_seconds(cluster, 120, [full] * 9)
    failed = cluster.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert 'EmptyDir volume "scratch"' in failed["message"]


def test_a_container_that_is_seen_dead_before_its_pod_is_failed_counts_once_and_the_kubelet_has_the_last_word() -> None:
    cluster = job()
    ended = cluster.killed()
    status = cluster.pods["job-generation-1"]["status"]
    status["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]
    cluster.settle()
    assert cluster.counts == (1, 0)
    status |= {"phase": "Failed", "reason": "Evicted", "message": FULL}
    cluster.turn()
    assert cluster.counts == (1, 0)
    assert cluster.job["status"]["restarts"]["lastReason"] == f"job-generation-1: Evicted: {FULL.strip()}"


def test_a_node_that_evicts_a_container_it_was_seen_to_kill_is_told_once() -> None:
    cluster = job()
    status = cluster.pods["job-generation-1"]["status"]
    status["containerStatuses"] = [{"name": "worker", "state": {"terminated": cluster.killed()}}]
    cluster.settle()
    cluster.evict("generation-1")
    cluster.turn()
    assert sum(cluster.counts) == 1


# -- rules about the kubelet's words


@pytest.mark.parametrize(
    ("terminated", "matches"),
    [
        ({"reasons": ["Evicted"]}, True),
        ({"message": 'EmptyDir volume "scr[a-z]+" exceeds'}, True),
        ({"reasons": ["Evicted"], "message": "^Usage of EmptyDir"}, True),
        ({"reasons": ["OOMKilled"], "message": "^Usage of EmptyDir"}, False),
        ({"reasons": ["Evicted"], "message": "ephemeral"}, False),
    ],
)
def test_a_rule_about_reason_and_words_decides(terminated: dict[str, Any], matches: bool) -> None:
    cluster = job({"name": "scratch", "action": "FailJob", "onPodFailure": terminated})
    full(cluster, "generation-1")
    cluster.settle()
    assert (cluster.condition("Failed")["reason"] == "FailurePolicy") == matches
    assert cluster.counts == ((0, 0) if matches else (1, 0))


def test_a_rule_can_make_a_sick_device_plugin_count_and_read_the_last_lines_of_a_log() -> None:
    rules = [
        {"name": "sick", "action": "Restart", "onPodFailure": {"reasons": ["UnexpectedAdmissionError"]}},
        {"name": "ecc", "action": "Ignore", "onPodFailure": {"message": "(?i)uncorrectable ecc error"}},
    ]
    cluster = job(*rules)
    sick(cluster, "generation-1")
    cluster.turn()
    assert cluster.counts == (1, 0)
    cluster.end("training-0", 1, message="RuntimeError: CUDA error: Uncorrectable ECC error encountered")
    cluster.turn()
    assert cluster.counts == (1, 1)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("ECC (", "RE2's syntax: error: unclosed group"), ("(x{11}){11}", "must repeat nothing more than 100 times")],
)
def test_a_pattern_that_the_api_server_took_and_nobody_can_search_for_is_told_with_its_field(
    pattern: str, why: str
) -> None:
    rule = {"name": "ecc", "action": "Ignore", "onPodFailure": {"message": pattern}}
    cluster = SimulatedCluster(runPolicy={"failurePolicy": {"rules": [rule]}})
    cluster.settle()
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidManifest")
    assert "spec.runPolicy.failurePolicy.rules[0].onPodFailure.message" in planned["message"]
    assert why in planned["message"]
    assert not cluster.pods


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "(.*)*x", "^(a?){50}a{50}$", "(.*a){40}x"])
def test_no_pattern_stalls_on_any_words(pattern: str) -> None:
    # By Python's own engine these take longer than the universe has existed.
    assert not pattern_found(pattern, "a" * 4000 + "!")


def test_times_in_the_record_come_from_the_pod() -> None:
    cluster = job()
    body = cluster.pods["job-generation-1"]
    pod = pod_of(body)
    assert isinstance(pod, ObservedPod)
    assert pod.began == START
    cluster.later(60)
    full(cluster, "generation-1")
    pod = pod_of(body)
    assert isinstance(pod, ObservedPod)
    assert pod.end is not None
    assert pod.end.at == START + timedelta(seconds=71)
