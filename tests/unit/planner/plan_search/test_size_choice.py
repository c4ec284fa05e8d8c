"""Sizes for `spec.devices`: they validate, keep what the job fixes, and depend on job, models and costs alone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans.plan_jobs import GRPO, PPO, ROUND, plan_document, plan_workload

from rlhf_api import manifest
from rlhf_api.device_sizes import DevicePlanRecord, asking_job, job_devices, plan_request, planned_job
from rlhf_api.job import RLHFJob
from rlhf_api.job.devices import SIZE_GROUPS
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource
from rlhf_planner.plan_search.size_choice import choose_again, choose_sizes
from rlhf_planner.plan_search.workload import UnplannableError

FIXED_SIZES: dict[str, dict[str, Any]] = {
    "Placement": {},
    "Generation": {"generation": {"replicas": 2}},
    "Inference": {"inference": {"replicas": 2}},
    "Training": {"training": {"parallelism": {"pipeline": 2}}},
}
"""Group -> fields of a spec that `spec.devices.fixed` then leaves."""


def job_with(count: int, fixed: tuple[str, ...] = (), algorithm: dict[str, Any] = PPO, **devices: Any) -> RLHFJob:
    """Return a job that leaves out all sizes but the fixed ones."""
    groups: dict[str, Any] = {"generation": {"replicas": 1}, "devices": {"count": count, "fixed": fixed, **devices}}
    for group in fixed:
        groups |= FIXED_SIZES[group]
    document = plan_document(algorithm, **groups)
    document["spec"]["devices"]["fixed"] = list(fixed)
    return RLHFJob.model_validate(document)


def chosen(job: RLHFJob) -> DevicePlanRecord:
    return choose_sizes(job, plan_workload(manifest.dump(job)), ROUND)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from((PPO, GRPO)), st.integers(6, 10), st.sets(st.sampled_from(SIZE_GROUPS), max_size=3))
def test_a_plan_validates_and_leaves_fixed_sizes(algorithm: dict[str, Any], count: int, fixed: set[str]) -> None:
    job = job_with(count, tuple(sorted(fixed)), algorithm)
    assert not manifest.broken_rules(job)
    record = chosen(job)
    planned = planned_job(job, record.sizes)
    assert not manifest.broken_rules(planned)
    assert job_devices(planned.spec) <= count
    assert job.spec.awaits_plan
    assert not planned.spec.awaits_plan
    before, after = job.spec, planned.spec
    assert "Placement" not in fixed or after.placement == before.placement
    assert "Generation" not in fixed or after.generation == before.generation
    assert "Inference" not in fixed or after.inference == before.inference
    assert "Training" not in fixed or after.training == before.training
    assert {name.title() for name, sizes in record.sizes if sizes is None} == fixed


def test_the_same_input_gives_the_same_record_which_survives_json() -> None:
    job = job_with(8)
    record = chosen(job)
    assert chosen(job) == record
    assert DevicePlanRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
    assert record.request == plan_request(job.spec)


@pytest.mark.parametrize("fixed", [(), ("Training",)])
def test_a_plan_is_predicted_beside_the_fastest_one_of_its_request(fixed: tuple[str, ...]) -> None:
    job = job_with(4, fixed)
    first = chosen(job)
    planned = planned_job(job, first.sizes)
    asking = asking_job(planned, first)
    assert asking.spec.awaits_plan
    workload = plan_workload(manifest.dump(asking))
    own, best = choose_again(asking, workload, ROUND)
    assert own.sizes == best.sizes == first.sizes, "it was the fastest one"
    assert own.predicted_seconds == best.predicted_seconds == pytest.approx(first.predicted_seconds)
    assert own.fixed == list(fixed)
    assert own.stages["train"].source == "assumed"
    slower = asking_job(planned, first.model_copy(update={"sizes": first.sizes.without(frozenset({"Inference"}))}))
    assert slower.spec.devices is not None
    assert set(slower.spec.devices.fixed) == {*fixed, "Inference"}
    shown = replace(ROUND, compute=CostFigure(2.0, FigureSource.LEARNED))
    assert choose_again(asking, workload, shown)[0].stages["train"].source == "learned", "its iterations show it"


def test_another_request_has_another_digest_and_live_fields_do_not_matter() -> None:
    job = job_with(8)
    layout = RLHFJob.model_validate(plan_document(devices={"count": 8}, training={"microBatchSize": 2})).spec
    requests = {plan_request(spec) for spec in (job.spec, job_with(7).spec, job_with(8, ("Placement",)).spec, layout)}
    assert len(requests) == 4
    longer = job.spec.model_copy(update={"iterations": 7, "suspend": True})
    assert plan_request(longer) == plan_request(job.spec)


def test_a_fixed_training_beyond_the_exhaustive_search_is_left() -> None:
    job = job_with(70, ("Training", "Generation"))
    after = planned_job(job, chosen(job).sizes).spec
    assert after.training == job.spec.training
    assert after.generation == job.spec.generation


def test_a_colocated_plan_needs_the_templates_of_both_groups_to_be_the_same() -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}}}
    document = plan_document(generation={"replicas": 1}, training={"template": template}, devices={"count": 1})
    job = RLHFJob.model_validate(document)
    with pytest.raises(UnplannableError, match="no plan of up to so many devices"):
        chosen(RLHFJob.model_validate(document))
    both = {"template": template}
    document = plan_document(generation={"replicas": 1, **both}, training=both, devices={"count": 1})
    shared = RLHFJob.model_validate(document)
    planned = planned_job(shared, chosen(shared).sizes)
    assert planned.spec.placement == "Colocated"
    assert planned.spec.training.template == {}
    assert job.spec.training.template == template


def test_a_plan_that_does_not_fit_names_the_count() -> None:
    with pytest.raises(UnplannableError, match=r"^spec.devices.count = 2: no plan .* with 1e-06 GiB each"):
        chosen(job_with(2, memory=1e-6))
