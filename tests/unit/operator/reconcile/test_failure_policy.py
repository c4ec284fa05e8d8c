"""The failure policy: which pod ends count, which restart more than a pod, and which end the job."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_api.job.failure import FailureRule
from rlhf_common.names import Group
from rlhf_operator.reconcile.failures.failure_policy import of_disruption, of_end
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod, PodEnd

DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def rule(name: str, action: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "action": action} | more


def job(*rules: dict[str, Any], limit: int = 2, **spec: Any) -> SimulatedCluster:
    return SimulatedCluster(runPolicy={"backoffLimit": limit, "failurePolicy": {"rules": list(rules)}}, **spec).begin()


def epochs(cluster: SimulatedCluster) -> dict[str, int]:
    return {group["name"]: group["epoch"] for group in cluster.job["status"]["groups"]}


def test_a_rule_ends_the_job_and_is_named() -> None:
    cluster = job(rule("oom", "FailJob", groups=["training"], onExitCodes={"values": [137]}))
    cluster.end("generation-0", 137, reason="OOMKilled")
    cluster.settle()
    assert cluster.counts == (1, 0), "the rule is about training"
    cluster.end("training-1", 137, reason="OOMKilled")
    cluster.settle()
    failed = cluster.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "FailurePolicy")
    assert failed["message"].startswith("job-training-1: it was killed for using more memory than its limit")
    assert failed["message"].endswith(" (rule oom of spec.runPolicy.failurePolicy)")


def test_what_a_rule_ignores_never_reaches_the_limit() -> None:
    cluster = job(rule("flaky", "Ignore", onExitCodes={"operator": "NotIn", "values": [1]}), limit=0)
    for number in range(4):
        cluster.end("inference-0", 3)
        cluster.settle()
        assert cluster.counts == (0, number + 1)
    assert cluster.events[-1] == "FailureIgnored"
    cluster.end("inference-0", 1)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_the_first_rule_that_matches_decides_also_over_the_built_in_ones() -> None:
    cluster = job(
        rule("storage", "Restart", onExitCodes={"values": [23]}), rule("all", "FailJob", onExitCodes={"values": [23]})
    )
    cluster.end("coordinator", 23)
    cluster.settle()
    assert cluster.counts == (1, 0)
    assert cluster.condition("Failed")["status"] == "False"


def test_evictions_can_be_made_to_count() -> None:
    cluster = job(rule("evicted", "Restart", onPodConditions=[DISRUPTED]), limit=1)
    cluster.evict("generation-0")
    cluster.settle()
    assert cluster.counts == (1, 0)
    cluster.finish_deletions()
    cluster.settle()
    cluster.run()
    cluster.evict("generation-0")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_what_kills_a_disrupted_pod_is_no_exit_code_of_the_job() -> None:
    cluster = job(rule("killed", "FailJob", onExitCodes={"values": [137]}))
    cluster.end("generation-0", 137, restarted=False)
    cluster.evict("generation-0")
    cluster.settle()
    assert cluster.counts == (0, 1)


def test_a_group_restarts_together_under_a_higher_epoch() -> None:
    cluster = job(rule("cuda", "Restart", scope="Group", onExitCodes={"values": [3]}))
    before = {name: body["metadata"]["uid"] for name, body in cluster.pods.items()}
    cluster.end("training-1", 3)
    cluster.settle()
    leaving = sorted(name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"])
    assert leaving == ["job-training-0", "job-training-1"]
    restarting = cluster.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "GroupRestart")
    assert (
        restarting["message"]
        == "training restarts: job-training-1: exit code 3 (rule cuda of spec.runPolicy.failurePolicy)"
    )
    cluster.finish_deletions()
    cluster.settle()
    assert epochs(cluster) == {"coordinator": 0, "generation": 0, "inference": 0, "training": 1}
    assert {cluster.pods[f"job-training-{rank}"]["metadata"]["labels"]["rlhf.dev/epoch"] for rank in (0, 1)} == {"1"}
    others = {name for name, body in cluster.pods.items() if body["metadata"]["uid"] == before[name]}
    assert others == before.keys() - {"job-training-0", "job-training-1"}
    assert cluster.counts == (1, 0), "the ranks that were deleted are no disruptions"
    cluster.run()
    cluster.later(11)
    cluster.read()
    cluster.settle()
    assert cluster.condition("Restarting")["status"] == "False"
    [training] = [group for group in cluster.job["status"]["groups"] if group["name"] == "training"]
    assert training["updated"] == 2


def test_the_whole_job_restarts_the_coordinator_included() -> None:
    cluster = job(rule("fabric", "Ignore", scope="Job", onPodConditions=[{"type": "FabricDown"}]))
    body = cluster.pods["job-inference-0"]
    body["status"]["conditions"].append({"type": "FabricDown", "status": "True"})
    cluster.settle()
    assert cluster.counts == (0, 0), "a condition of a pod that runs is no end"
    cluster.end("inference-0", 1)
    cluster.settle()
    assert cluster.counts == (0, 1)
    assert set(epochs(cluster).values()) == {1}
    assert cluster.condition("Restarting")["reason"] == "JobRestart"
    cluster.finish_deletions()
    cluster.settle()
    assert {pod["metadata"]["labels"]["rlhf.dev/epoch"] for pod in cluster.pods.values()} == {"1"}
    assert cluster.counts == (0, 1)


def test_an_operator_that_dies_after_raising_an_epoch_goes_on_with_the_restart() -> None:
    cluster = job(rule("cuda", "Restart", scope="Group", onExitCodes={"values": [3]}))
    cluster.end("training-1", 3)
    cluster.carry_out(cluster.plan(), only_status=True)
    assert not [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    assert epochs(cluster)["training"] == 1
    assert cluster.pods["job-training-0"]["metadata"]["labels"]["rlhf.dev/epoch"] == "1"
    assert cluster.counts == (1, 0)


@pytest.mark.parametrize(("worker", "code"), [("training-0", 75), ("generation-0", 0), ("coordinator", 130)])
def test_requests_of_our_own_processes_are_no_failures_whatever_the_rules_say(worker: str, code: int) -> None:
    cluster = job(rule("any", "FailJob", onExitCodes={"operator": "NotIn", "values": [200]}))
    cluster.end(worker, code)
    cluster.settle()
    assert cluster.counts == (0, 0)
    assert cluster.condition("Failed")["status"] == "False"


CODES = st.integers(1, 255)
RULES = st.lists(
    st.builds(
        lambda number, action, groups, codes, operator, types: FailureRule.model_validate(
            {"name": f"rule-{number}", "action": action, "groups": groups}
            | (
                {"onPodConditions": [{"type": item} for item in types]}
                if types
                else {"onExitCodes": {"operator": operator, "values": codes}}
            )
        ),
        st.integers(0, 99),
        st.sampled_from(["Ignore", "Restart", "FailJob"]),
        st.none() | st.lists(st.sampled_from(sorted(Group)), min_size=1, max_size=2),
        st.lists(CODES, min_size=1, max_size=3),
        st.sampled_from(["In", "NotIn"]),
        st.lists(st.sampled_from(["DisruptionTarget", "FabricDown"]), max_size=2),
    ),
    max_size=5,
)
PODS = st.builds(
    lambda group, code, types: ObservedPod(
        "job-x", "uid", group, 0, "Running",
        end=PodEnd("id", code, "Error", "", None),
        conditions=frozenset((item, "True") for item in types),
    ),
    st.sampled_from(sorted(Group)),
    CODES,
    st.lists(st.sampled_from(["DisruptionTarget", "FabricDown"]), max_size=2),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(RULES, PODS)
def test_only_the_first_rule_that_matches_is_heard(rules: list[FailureRule], pod: ObservedPod) -> None:
    alone = [rule for rule in rules if of_end([rule], pod).rule]
    expected = of_end(alone[:1], pod)
    assert of_end(rules, pod) == expected
    assert bool(expected.rule) == bool(alone)
    by_condition = [item for item in alone if item.on_pod_conditions]
    assert of_disruption(rules, pod) == of_disruption(by_condition[:1], pod)
