"""The plan for `spec.devices` is recorded once in the journal, and taken from it while the request stays the same."""

import json
from pathlib import Path

import pytest
from tests.support.plans.plan_jobs import plan_document

from rlhf_api import manifest
from rlhf_api.device_sizes import DevicePlanRecord, plan_request
from rlhf_api.job import RLHFJob
from rlhf_coordinator.device_plan import KEY, choose, recorded_plan, take_plan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal
from rlhf_planner.plan_search.workload import UnplannableError


def asking(count: int = 4) -> RLHFJob:
    """Return a job that asks for a plan."""
    return RLHFJob.model_validate(plan_document(generation={"replicas": 1}, devices={"count": count}))


def plan_of(job: RLHFJob, workers: int = 2) -> DevicePlanRecord:
    """Return a plan for a job with a number of generation workers."""
    generation = {"replicas": workers, "maxBatchSize": 8, "parallelism": {"tensor": 1}}
    return DevicePlanRecord.model_validate(
        {
            "request": plan_request(job.spec),
            "summary": f"Dedicated {workers}",
            "predictedSeconds": 1.5,
            "sizes": {"placement": "Dedicated", "generation": generation, "inference": {"replicas": 0}},
        }
    )


def refuse(job: RLHFJob) -> DevicePlanRecord:
    raise UnplannableError("no plan fits")


def test_a_new_plan_is_recorded_and_then_taken_whatever_the_costs_are(tmp_path: Path) -> None:
    job, journal = asking(), Journal(tmp_path)
    first, plan = take_plan(job, journal, lambda asked: plan_of(asked, 2))
    assert first.spec.generation.replicas == 2
    assert not first.spec.awaits_plan
    assert json.loads((tmp_path / "job.json").read_text())[KEY]["predictedSeconds"] == 1.5
    again, recorded = take_plan(job, Journal(tmp_path), lambda asked: plan_of(asked, 3))
    assert (again, recorded) == (first, plan)
    assert take_plan(first, Journal(tmp_path), refuse) == (first, plan), "nothing is left to choose"


def test_another_request_gets_another_plan_and_the_other_facts_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    take_plan(asking(4), journal, lambda asked: plan_of(asked, 2))
    journal.write_job(journal.job() | {"identity": {"spec.seed": 3}})
    job, plan = take_plan(asking(5), journal, lambda asked: plan_of(asked, 3))
    assert job.spec.generation.replicas == 3
    assert plan == recorded_plan(journal)
    assert journal.job()["identity"] == {"spec.seed": 3}


def test_a_job_without_devices_is_left_alone(tmp_path: Path) -> None:
    job = RLHFJob.model_validate(plan_document())
    assert take_plan(job, Journal(tmp_path), refuse) == (job, None)
    assert not (tmp_path / "job.json").exists()


def test_a_job_without_a_plan_fails_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no plan fits") as failed:
        take_plan(asking(), Journal(tmp_path), refuse)
    assert failed.value.failure.field == "spec.devices"
    with pytest.raises(UnplannableError, match="models of actor"):
        choose(manifest.resolve(asking(), tmp_path))
