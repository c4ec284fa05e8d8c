"""What makes pods in a circle is slowed down: how often a place gets a new pod, whatever its pods end by."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_cluster import START, SimulatedCluster

from rlhf_api.user_patterns import pattern_found
from rlhf_operator.reconcile import pod_of
from rlhf_operator.reconcile.pod_back_off import LONGEST, RAN_WELL, delay

LIMIT = 1000
FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". '
SICK = "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc failed, which is unexpected"
PRESSED = "Pod was rejected: The node had condition: [DiskPressure]. "


def job(*rules: dict[str, Any], limit: int = LIMIT, **spec: Any) -> SimulatedCluster:
    return SimulatedCluster(runPolicy={"backoffLimit": limit, "failurePolicy": {"rules": list(rules)}}, **spec).begin()


def counts(world: SimulatedCluster) -> tuple[int, int]:
    restarts = world.job["status"]["restarts"]
    return restarts["failures"], restarts["disruptions"]


def turn(world: SimulatedCluster) -> None:
    """The operator looks until it has nothing left to do, and kubelets do what it asked for."""
    world.settle()
    world.finish_deletions()
    world.settle()


def uid(world: SimulatedCluster, worker: str = "generation-1") -> str | None:
    body = world.pods.get(world.name(worker))
    return body["metadata"]["uid"] if body else None


def made(
    world: SimulatedCluster, seconds: float, ends: list[Any], worker: str = "generation-1", step: float = 1.0
) -> list[float]:
    """Seconds at which a place got a pod, while each of its pods meets the next of `ends` as soon as it is up."""
    begun, at, seen, left = world.now, [], uid(world, worker), iter(ends)
    while (world.now - begun).total_seconds() < seconds:
        turn(world)
        if uid(world, worker) not in (seen, None):
            seen = uid(world, worker)
            at.append((world.now - begun).total_seconds())
        body = world.pods.get(world.name(worker))
        if body and body["status"]["phase"] == "Pending":
            world.run(worker)
        elif body and body["status"]["phase"] == "Running" and (end := next(left, None)):
            end(world, worker)
        world.later(step)
    return at


def sick(world: SimulatedCluster, worker: str) -> None:
    world.fail(worker, "UnexpectedAdmissionError", SICK)


def full(world: SimulatedCluster, worker: str) -> None:
    world.fail(worker, "Evicted", FULL, killed=True)


def drained(world: SimulatedCluster, worker: str) -> None:
    world.evict(worker)


def deleted(world: SimulatedCluster, worker: str) -> None:
    world.ask_deletion(world.name(worker))


def restarts(world: SimulatedCluster, worker: str) -> None:
    world.end(worker, 75, restarted=False)


def done(world: SimulatedCluster, worker: str) -> None:
    world.end(worker, 0)
    world.pods[world.name(worker)]["status"]["phase"] = "Succeeded"


def fabric(world: SimulatedCluster, worker: str) -> None:
    world.end(worker, 4)


def crashes(world: SimulatedCluster, worker: str) -> None:
    world.end(worker, 1, restarted=False)


ENDS = [sick, full, drained, deleted, restarts, done, fabric, crashes]
CIRCLE = {"name": "fabric", "action": "Ignore", "scope": "Job", "onExitCodes": {"values": [4]}}


@pytest.mark.parametrize("end", [sick, full, drained, deleted], ids=lambda end: end.__name__)
def test_a_place_whose_pods_end_at_once_gets_three_pods_in_25_seconds_and_not_52(end: Any) -> None:
    world = job()
    at = made(world, 25, [end] * 60, step=0.25)
    assert 2 <= len(at) <= 3, at
    told = str(world.condition("Running")["message"])
    assert "before job-generation-1 is made again, because it ended 3 times in a row, the last time: " in told
    assert "(20 s after it was last made)" in told


def test_the_first_replacement_is_made_at_once_and_the_others_ever_later() -> None:
    assert [delay(ends).total_seconds() for ends in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert delay(10**6) == LONGEST


def test_a_pod_that_ran_well_begins_anew() -> None:
    world = job()
    made(world, 30, [drained] * 3)
    world.later(60)
    turn(world)
    world.run()
    world.later(RAN_WELL.total_seconds())
    world.settle()
    assert world.job["status"]["restarts"]["backOff"] == []
    world.evict("generation-1")
    before = uid(world)
    turn(world)
    assert uid(world) not in (before, None), "the first replacement is made at once"


def test_a_restarted_operator_waits_as_long_and_no_longer() -> None:
    world = job()
    made(world, 12, [sick] * 9, step=0.25)
    assert uid(world) is None
    world.written = None  # what a process knows beside the status
    [place] = world.job["status"]["restarts"]["backOff"]
    world.now = datetime.fromisoformat(place["until"]) - timedelta(seconds=3)
    turn(world)
    assert uid(world) is None
    assert (world.plan().requeue_after or 99) <= 3
    world.later(3)
    turn(world)
    assert uid(world) is not None


def test_another_template_is_tried_at_once() -> None:
    world = job()
    made(world, 12, [sick] * 9, step=0.25)
    assert uid(world) is None
    world.job["spec"]["generation"]["template"] = {"metadata": {"annotations": {"cured": "yes"}}}
    world.job["metadata"]["generation"] = 2
    turn(world)
    assert uid(world) is not None


def test_a_suspension_begins_anew() -> None:
    world = job()
    made(world, 12, [sick] * 9, step=0.25)
    world.job["spec"]["suspend"] = True
    for _ in range(3):
        turn(world)
    world.job["spec"]["suspend"] = False
    turn(world)
    assert uid(world) is not None
    assert world.job["status"]["restarts"]["backOff"] == []


@settings(max_examples=5)
@given(st.lists(st.sampled_from(ENDS), min_size=20, max_size=40), st.sampled_from(["generation-1", "training-0"]))
def test_whatever_ends_its_pods_a_place_gets_few_of_them_an_hour(ends: list[Any], worker: str) -> None:
    world = job(CIRCLE)
    at = made(world, 3600, ends, worker, step=15.0)
    assert len(at) <= 7 + 12
    for number, moment in enumerate(at):
        within = [each for each in at[number:] if each - moment < RAN_WELL.total_seconds()]
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
    world = job()
    world.fail("generation-1", reason, message, killed=not message.startswith("Pod was rejected"))
    turn(world)
    assert counts(world) == expected
    told = world.job["status"]["restarts"]["lastReason"]
    assert told.startswith("job-generation-1: ")
    assert f"{reason}: {message.strip()}" in told
    world.settle()
    assert counts(world) == expected, "looked at twice"


def test_an_eviction_for_its_own_limit_counts_towards_the_backoff_limit() -> None:
    world = job(limit=2)
    made(world, 120, [full] * 9)
    failed = world.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert 'EmptyDir volume "scratch"' in failed["message"]


def test_a_container_that_is_seen_dead_before_its_pod_is_failed_counts_once_and_the_kubelet_has_the_last_word() -> None:
    world = job()
    ended = world.killed()
    status = world.pods["job-generation-1"]["status"]
    status["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]
    world.settle()
    assert counts(world) == (1, 0)
    status |= {"phase": "Failed", "reason": "Evicted", "message": FULL}
    turn(world)
    assert counts(world) == (1, 0)
    assert world.job["status"]["restarts"]["lastReason"] == f"job-generation-1: Evicted: {FULL.strip()}"


def test_a_node_that_evicts_a_container_it_was_seen_to_kill_is_told_once() -> None:
    world = job()
    status = world.pods["job-generation-1"]["status"]
    status["containerStatuses"] = [{"name": "worker", "state": {"terminated": world.killed()}}]
    world.settle()
    world.evict("generation-1")
    turn(world)
    assert sum(counts(world)) == 1


# -- rules about the kubelet's words


@pytest.mark.parametrize(
    ("told", "matches"),
    [
        ({"reasons": ["Evicted"]}, True),
        ({"message": 'EmptyDir volume "scr[a-z]+" exceeds'}, True),
        ({"reasons": ["Evicted"], "message": "^Usage of EmptyDir"}, True),
        ({"reasons": ["OOMKilled"], "message": "^Usage of EmptyDir"}, False),
        ({"reasons": ["Evicted"], "message": "ephemeral"}, False),
    ],
)
def test_a_rule_about_reason_and_words_decides(told: dict[str, Any], matches: bool) -> None:
    world = job({"name": "scratch", "action": "FailJob", "onPodFailure": told})
    full(world, "generation-1")
    world.settle()
    assert (world.condition("Failed")["reason"] == "FailurePolicy") == matches
    assert counts(world) == ((0, 0) if matches else (1, 0))


def test_a_rule_can_make_a_sick_device_plugin_count_and_read_the_last_lines_of_a_log() -> None:
    rules = [
        {"name": "sick", "action": "Restart", "onPodFailure": {"reasons": ["UnexpectedAdmissionError"]}},
        {"name": "ecc", "action": "Ignore", "onPodFailure": {"message": "(?i)uncorrectable ecc error"}},
    ]
    world = job(*rules)
    sick(world, "generation-1")
    turn(world)
    assert counts(world) == (1, 0)
    world.end("training-0", 1, message="RuntimeError: CUDA error: Uncorrectable ECC error encountered")
    turn(world)
    assert counts(world) == (1, 1)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("ECC (", "RE2's syntax: error: unclosed group"), ("(x{11}){11}", "must repeat nothing more than 100 times")],
)
def test_a_pattern_that_the_api_server_took_and_nobody_can_search_for_is_told_with_its_field(
    pattern: str, why: str
) -> None:
    rule = {"name": "ecc", "action": "Ignore", "onPodFailure": {"message": pattern}}
    world = SimulatedCluster(runPolicy={"failurePolicy": {"rules": [rule]}})
    world.settle()
    planned = world.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidManifest")
    assert "spec.runPolicy.failurePolicy.rules[0].onPodFailure.message" in planned["message"]
    assert why in planned["message"]
    assert not world.pods


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "(.*)*x", "^(a?){50}a{50}$", "(.*a){40}x"])
def test_no_pattern_stalls_on_any_words(pattern: str) -> None:
    # By Python's own engine these take longer than the universe has existed.
    assert not pattern_found(pattern, "a" * 4000 + "!")


def test_times_in_the_record_come_from_the_pod() -> None:
    world = job()
    body = world.pods["job-generation-1"]
    pod = pod_of(body)
    assert pod is not None
    assert pod.began == START
    world.later(60)
    full(world, "generation-1")
    pod = pod_of(body)
    assert pod is not None
    assert pod.end is not None
    assert pod.end.at == START + timedelta(seconds=71)
