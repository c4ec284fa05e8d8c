"""Properties of the plan search: valid plans, monotone in devices, the same for the same seed."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans.plan_jobs import GRPO, PPO, ROUND, plan_document, plan_workload

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_operator.manifests.pod_problems import problems_of_pods
from rlhf_planner.device_memory import GIBIBYTE
from rlhf_planner.plan_search.device_chart import device_chart
from rlhf_planner.plan_search.device_plan import DevicePlan, devices_of, manifest_with, refused_manifest
from rlhf_planner.plan_search.iteration_forecast import PlanForecast
from rlhf_planner.plan_search.search import PlanSearch, counts_up_to
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.training_seconds import training_times

CASES: dict[str, dict[str, Any]] = {
    "ppo": plan_document(PPO),
    "ppo on GPUs": plan_document(PPO, gpus=1),
    "ppo with megatron": plan_document(PPO, gpus=1, training={"backend": "megatron"}),
    "grpo": plan_document(GRPO),
    "colocated": plan_document(PPO, placement="Colocated", inference={"replicas": 0}),
    "adapters": plan_document(PPO, training={"lora": {"rank": 4}}),
    "decoding beside training": plan_document(GRPO, rollout={"overlapTraining": "Enabled"}),
    "several ranks in a pod": plan_document(PPO, training={"parallelism": {"data": 2}, "ranksPerPod": 2}),
    "a rule for the training group": plan_document(
        PPO, runPolicy={"failurePolicy": {"rules": [{"name": "bad", "action": "FailJob", "groups": ["training"],
                                                     "onExitCodes": {"operator": "In", "values": [3]}}]}}
    ),
}  # fmt: skip


def searched(document: dict[str, Any], device_bytes: int | None = None) -> PlanSearch:
    job = RLHFJob.model_validate(document)

    def accepts(plan: DevicePlan) -> bool:
        return not refused_manifest(manifest_with(document, job, plan))

    return PlanSearch(plan_workload(document), ROUND, device_bytes, accepts)


@cache
def search_of(case: str) -> PlanSearch:
    """Return the search of a case, which computes each half once for all numbers of devices."""
    return searched(CASES[case])


@cache
def plans(case: str, devices: int) -> list[PlanForecast]:
    return find_plans(search_of(case), devices)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(2, 12))
def test_every_plan_validates_and_renders_and_has_no_more_devices(case: str, devices: int) -> None:
    document = CASES[case]
    job = RLHFJob.model_validate(document)
    found = plans(case, devices)
    assert found
    for forecast in found:
        data = manifest_with(document, job, forecast.plan)
        planned = manifest.parse_stored(data)
        assert problems_of_pods(planned) == []
        assert DevicePlan.from_spec(planned.spec) == forecast.plan
        assert devices_of(job.spec, forecast.plan) == forecast.devices <= devices
        assert devices_of(planned.spec, DevicePlan.from_spec(planned.spec)) == forecast.devices
        assert forecast.seconds > 0
        assert sum(figure.value for figure in forecast.stages.values()) >= forecast.seconds * (1 - 1e-9)
        assert device_chart(job.spec, forecast.plan, devices)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(2, 12))
def test_one_more_device_is_never_predicted_slower(case: str, devices: int) -> None:
    assert plans(case, devices + 1)[0].seconds <= plans(case, devices)[0].seconds


def test_the_same_seed_gives_the_same_plan_and_more_devices_are_never_slower_beyond_the_exhaustive_search() -> None:
    document, few = plan_document(GRPO), 4
    search = searched(document)
    by_devices = [find_plans(search, devices, seed=3, exhaustive=few) for devices in range(few, 25)]
    again = find_plans(searched(document), 24, seed=3, exhaustive=few)
    assert [plan.plan for plan in by_devices[-1]] == [plan.plan for plan in again]
    seconds = [plans[0].seconds for plans in by_devices]
    assert seconds == sorted(seconds, reverse=True)
    best = search.exhaustive(24)[0].seconds
    assert best <= seconds[-1] <= 1.1 * best


@pytest.mark.parametrize("case", ["ppo", "grpo", "decoding beside training"])
def test_the_search_finds_the_best_of_all_plans_of_a_few_devices(case: str) -> None:
    document = CASES[case]
    search = searched(document)
    seconds = []
    for placement in search.placements:
        for workers in search.workers(placement, 6):
            for ranks in range(1, 7):
                half = search.trainings.best(placement, ranks)
                rollout = search.rollouts.half(workers)
                fits = ranks <= workers.generation_workers if placement == "Colocated" else (
                    search.rollouts.devices(workers) + ranks <= 6
                )  # fmt: skip
                if half is not None and fits:
                    seconds += [
                        search.combination.seconds(placement, rollout, half, overlap)[0]
                        for overlap in search.overlaps(placement)
                    ]
    assert find_plans(searched(document), 6)[0].seconds == pytest.approx(min(seconds), rel=1e-12)


def test_memory_moves_the_plan_to_layouts_that_fit() -> None:
    document = plan_document(PPO, gpus=1)
    free = find_plans(searched(document), 4)[0]
    limit = max(memory.total for memory in free.memory.values()) - 1
    tight = find_plans(searched(document, limit), 4)[0]
    assert all(memory.total <= limit for memory in tight.memory.values())
    assert tight.seconds >= free.seconds
    assert find_plans(searched(document, limit // 2), 4) == [], "the context of CUDA alone is larger"
    assert find_plans(searched(document, 80 * GIBIBYTE), 4)[0].seconds <= free.seconds


def test_the_own_plan_is_predicted_by_the_same_functions() -> None:
    document = plan_document(PPO, training={"parallelism": {"pipeline": 2}})
    search = searched(document)
    own = search.own
    assert own.plan.parallelism.pipeline == 2
    assert own.devices == 2 + 1 + 2
    half = search.trainings.best("Dedicated", 2)
    assert half is not None
    assert own.training.total >= half.times.total
    assert training_times(search.workload, ROUND, half.settings).total == half.times.total


def test_counts_of_fewer_devices_are_among_those_of_more() -> None:
    for limit in (1, 5, 64, 65, 100, 1024):
        counts = counts_up_to(limit)
        assert counts == sorted(set(counts))
        assert counts[-1] <= limit
        assert set(counts_up_to(max(1, limit - 1))) <= set(counts)
    assert counts_up_to(1024)[-1] == 1024


def test_a_chart_shows_every_group() -> None:
    job = RLHFJob.model_validate(CASES["ppo"])
    plan = DevicePlan.from_spec(job.spec)
    assert device_chart(job.spec, plan, 5) == [
        "generation  ██ 2: 2 workers",
        "inference   ▒ 1: 1 worker",
        "training    ░ 1: one rank",
        "idle        · 1",
    ]
    assert device_chart(job.spec, plan, 256)[-1] == "one character: 4 devices"
