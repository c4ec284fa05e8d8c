"""The failure policy as its user sees it: which ends count, which restart more than a pod, which end the job."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_cluster import SimulatedCluster

from rlhf_api.job.failure import FailureRule
from rlhf_api.names import Group
from rlhf_operator.reconcile.failure_policy import of_disruption, of_end
from rlhf_operator.reconcile.observed_pod import ObservedPod, PodEnd

DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def rule(name: str, action: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "action": action} | more


def job(*rules: dict[str, Any], limit: int = 2, **spec: Any) -> SimulatedCluster:
    return SimulatedCluster(runPolicy={"backoffLimit": limit, "failurePolicy": {"rules": list(rules)}}, **spec).begin()


def counts(world: SimulatedCluster) -> tuple[int, int]:
    restarts = world.job["status"]["restarts"]
    return restarts["failures"], restarts["disruptions"]


def epochs(world: SimulatedCluster) -> dict[str, int]:
    return {each["name"]: each["epoch"] for each in world.job["status"]["groups"]}


def test_a_rule_ends_the_job_and_is_named() -> None:
    world = job(rule("oom", "FailJob", groups=["training"], onExitCodes={"values": [137]}))
    world.end("generation-0", 137, reason="OOMKilled")
    world.settle()
    assert counts(world) == (1, 0), "the rule is about training"
    world.end("training-1", 137, reason="OOMKilled")
    world.settle()
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "FailurePolicy")
    assert failed["message"].startswith("job-training-1: it was killed for using more memory than its limit")
    assert failed["message"].endswith(" (rule oom of spec.runPolicy.failurePolicy)")


def test_what_a_rule_ignores_never_reaches_the_limit() -> None:
    world = job(rule("flaky", "Ignore", onExitCodes={"operator": "NotIn", "values": [1]}), limit=0)
    for number in range(4):
        world.end("inference-0", 3)
        world.settle()
        assert counts(world) == (0, number + 1)
    assert world.events[-1] == "FailureIgnored"
    world.end("inference-0", 1)
    world.settle()
    assert world.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_the_first_rule_that_matches_decides_also_over_the_built_in_ones() -> None:
    world = job(
        rule("storage", "Restart", onExitCodes={"values": [23]}), rule("all", "FailJob", onExitCodes={"values": [23]})
    )
    world.end("coordinator", 23)
    world.settle()
    assert counts(world) == (1, 0)
    assert world.condition("Failed")["status"] == "False"


def test_evictions_can_be_made_to_count() -> None:
    world = job(rule("evicted", "Restart", onPodConditions=[DISRUPTED]), limit=1)
    world.evict("generation-0")
    world.settle()
    assert counts(world) == (1, 0)
    world.finish_deletions()
    world.settle()
    world.run()
    world.evict("generation-0")
    world.settle()
    assert world.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_what_kills_a_disrupted_pod_is_no_exit_code_of_the_job() -> None:
    world = job(rule("killed", "FailJob", onExitCodes={"values": [137]}))
    world.end("generation-0", 137, restarted=False)
    world.evict("generation-0")
    world.settle()
    assert counts(world) == (0, 1)


def test_a_group_restarts_together_under_a_higher_epoch() -> None:
    world = job(rule("cuda", "Restart", scope="Group", onExitCodes={"values": [3]}))
    before = {name: body["metadata"]["uid"] for name, body in world.pods.items()}
    world.end("training-1", 3)
    world.settle()
    leaving = sorted(name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"])
    assert leaving == ["job-training-0", "job-training-1"]
    restarting = world.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "GroupRestart")
    assert (
        restarting["message"]
        == "training restarts: job-training-1: exit code 3 (rule cuda of spec.runPolicy.failurePolicy)"
    )
    world.finish_deletions()
    world.settle()
    assert epochs(world) == {"coordinator": 0, "generation": 0, "inference": 0, "training": 1}
    assert {world.pods[f"job-training-{rank}"]["metadata"]["labels"]["rlhf.dev/epoch"] for rank in (0, 1)} == {"1"}
    others = {name for name, body in world.pods.items() if body["metadata"]["uid"] == before[name]}
    assert others == before.keys() - {"job-training-0", "job-training-1"}
    assert counts(world) == (1, 0), "the ranks that were deleted are no disruptions"
    world.run()
    world.later(11)
    world.read()
    world.settle()
    assert world.condition("Restarting")["status"] == "False"
    [training] = [each for each in world.job["status"]["groups"] if each["name"] == "training"]
    assert training["updated"] == 2


def test_the_whole_job_restarts_the_coordinator_included() -> None:
    world = job(rule("fabric", "Ignore", scope="Job", onPodConditions=[{"type": "FabricDown"}]))
    body = world.pods["job-inference-0"]
    body["status"]["conditions"].append({"type": "FabricDown", "status": "True"})
    world.settle()
    assert counts(world) == (0, 0), "a condition of a pod that runs is no end"
    world.end("inference-0", 1)
    world.settle()
    assert counts(world) == (0, 1)
    assert set(epochs(world).values()) == {1}
    assert world.condition("Restarting")["reason"] == "JobRestart"
    world.finish_deletions()
    world.settle()
    assert {each["metadata"]["labels"]["rlhf.dev/epoch"] for each in world.pods.values()} == {"1"}
    assert counts(world) == (0, 1)


def test_an_operator_that_dies_after_raising_an_epoch_goes_on_with_the_restart() -> None:
    world = job(rule("cuda", "Restart", scope="Group", onExitCodes={"values": [3]}))
    world.end("training-1", 3)
    world.carry_out(world.plan(), only_status=True)
    assert not [name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"]]
    world.settle()
    world.finish_deletions()
    world.settle()
    assert epochs(world)["training"] == 1
    assert world.pods["job-training-0"]["metadata"]["labels"]["rlhf.dev/epoch"] == "1"
    assert counts(world) == (1, 0)


@pytest.mark.parametrize(("worker", "code"), [("training-0", 75), ("generation-0", 0), ("coordinator", 130)])
def test_requests_of_our_own_processes_are_no_failures_whatever_the_rules_say(worker: str, code: int) -> None:
    world = job(rule("any", "FailJob", onExitCodes={"operator": "NotIn", "values": [200]}))
    world.end(worker, code)
    world.settle()
    assert counts(world) == (0, 0)
    assert world.condition("Failed")["status"] == "False"


CODES = st.integers(1, 255)
RULES = st.lists(
    st.builds(
        lambda number, action, groups, codes, operator, types: FailureRule.model_validate(
            {"name": f"rule-{number}", "action": action, "groups": groups}
            | (
                {"onPodConditions": [{"type": each} for each in types]}
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
        conditions=frozenset((each, "True") for each in types),
    ),
    st.sampled_from(sorted(Group)),
    CODES,
    st.lists(st.sampled_from(["DisruptionTarget", "FabricDown"]), max_size=2),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(RULES, PODS)
def test_only_the_first_rule_that_matches_is_heard(rules: list[FailureRule], pod: ObservedPod) -> None:
    alone = [each for each in rules if of_end([each], pod).rule]
    expected = of_end(alone[:1], pod)
    assert of_end(rules, pod) == expected
    assert bool(expected.rule) == bool(alone)
    by_condition = [each for each in alone if each.on_pod_conditions]
    assert of_disruption(rules, pod) == of_disruption(by_condition[:1], pod)
