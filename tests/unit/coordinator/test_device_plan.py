"""The plan for `spec.devices` is recorded once in the journal, and taken from it while the request stays the same."""

import json
from pathlib import Path

import pytest
from tests.support.manifests.header_job import write_header_job
from tests.support.plans.plan_jobs import plan_document

from rlhf_api import manifest
from rlhf_api.device_sizes import DevicePlanRecord, plan_request
from rlhf_api.job import RLHFJob
from rlhf_api.protocol import read_job
from rlhf_coordinator.device_plan import choose, recorded_plan, take_plan, write_ran_job
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.learned_figures import PLAN_KEY
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_pb2 import Begun
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, PassFormula
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
    assert json.loads((tmp_path / "job.json").read_text())[PLAN_KEY]["predictedSeconds"] == 1.5
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
        choose(manifest.resolve(asking(), tmp_path), None)


def test_a_plan_uses_what_its_own_run_has_shown(tmp_path: Path) -> None:
    spec = plan_document(generation={"replicas": 1}, inference={"replicas": 1}, devices={"count": 4})["spec"]
    job = manifest.resolve(manifest.load(write_header_job(tmp_path, spec)), tmp_path)
    run = tmp_path / "run"
    assumed = choose(job, run)
    assert {stage.source for stage in assumed.stages.values()} == {"assumed"}
    assert choose(job, None) == assumed
    assert "a: assumed" in assumed.words
    (run / "journal").mkdir(parents=True)
    stage = StageCosts(DecodeLines((1,), (1.0,), (0.0,)), 16, score=PassFormula(per_sample=3.0), score_batch=1)
    (run / "journal" / "job.json").write_text(json.dumps({JOB_KEY: {"costs": stage.document()}}))
    slow = choose(job, run)
    assert slow.stages["generate"].seconds > 8, "a step takes a second"
    times = [{"tokens": 1, "seconds": 100.0}]
    layers = [{"role": role, "source": "measured", "times": times} for role in ("actor", "critic")]
    (run / "costs.json").write_text(json.dumps({"layers": layers}))
    assert choose(job, run).stages["train"].seconds > 1000 * slow.stages["train"].seconds


def test_the_job_as_it_runs_is_in_the_run_folder_of_a_pod(tmp_path: Path) -> None:
    job, _ = take_plan(asking(), Journal(tmp_path / "journal"), plan_of)
    write_ran_job(job, tmp_path, tmp_path / "config" / "job.json")
    assert read_job(json.loads((tmp_path / "job.json").read_text())) == job
    before = (tmp_path / "job.json").stat().st_mtime_ns
    write_ran_job(job, tmp_path, tmp_path / "job.json")
    assert (tmp_path / "job.json").stat().st_mtime_ns == before, "`rlhf run` has written it"
    write_ran_job(RLHFJob.model_validate(plan_document()), tmp_path / "other", tmp_path / "config" / "job.json")
    assert not (tmp_path / "other").exists()


def test_a_new_plan_begins_at_the_iteration_in_progress(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(Begun(iteration=7))
    plan = take_plan(asking(), journal, plan_of)[1]
    assert plan is not None
    assert plan.since == 7


def test_replanning_is_no_part_of_the_request() -> None:
    report = asking()
    devices = report.spec.devices
    assert devices is not None
    changed = devices.model_copy(update={"replan": "Disabled"})
    disabled = report.model_copy(update={"spec": report.spec.model_copy(update={"devices": changed})})
    assert plan_request(disabled.spec) == plan_request(report.spec)
