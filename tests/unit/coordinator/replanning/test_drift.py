"""A job with a drifted plan decides once, journals the decision first, and changes its plan at a checkpoint."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_api.device_sizes import DevicePlanRecord, plan_request, planned_job
from rlhf_coordinator.device_plan import REPLANNING_KEY, recorded_plan, take_plan, written_plan
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.plan_drift_metrics import plan_drift_metrics
from rlhf_coordinator.learned_figures import PLAN_KEY
from rlhf_coordinator.replanning import drift
from rlhf_coordinator.storage.journal import Journal

ITERATIONS = 40
STAGES = ("generate", "score", "train", "publish")


def plan(workers: int, seconds: float, request: str = "r", **changes: Any) -> DevicePlanRecord:
    """Return a plan with a number of generation workers whose training takes all its seconds."""
    generation = {"replicas": workers, "maxBatchSize": 6, "parallelism": {"tensor": 1}}
    stages = {name: {"seconds": seconds if name == "train" else 0.0, "source": "learned"} for name in STAGES}
    document = {
        "request": request,
        "summary": f"{workers} workers",
        "predictedSeconds": seconds,
        "sizes": {"generation": generation},
        "stages": stages,
    }
    return DevicePlanRecord.model_validate(document | changes)


def start(folder: Path, mode: str = "Auto") -> JobRun:
    """Return a coordinator that starts with the plan of its journal, or with one of 2 workers in a new journal."""
    devices = {"count": 8, "fixed": ["Placement", "Inference", "Training"], "replan": mode}
    job = make_job(folder, iterations=ITERATIONS, generation={"maxBatchSize": 6}, devices=devices)
    journal = Journal(folder / "run" / "journal")
    sized, taken = take_plan(job, journal, lambda asked: plan(2, 1.0, plan_request(asked.spec)))
    run = begin_in_process(folder, sized)[0]
    run.context = replace(run.context, device_plan=taken)
    drift.begin(run)
    run.state.plan_drift.process_seconds = 0.0  # the age of pytest
    run.state.plan_drift.first = False
    return run


def end_iteration(run: JobRun, seconds: float, *, iteration: int = 8) -> None:
    """Close an iteration that took so many seconds of training, without a search."""
    run.state.ledger.iteration = iteration
    run.state.plan_drift.searching = True
    run.times.seconds = {"Training": seconds}
    drift.iteration_ended(run)


def decide(run: JobRun, best: DevicePlanRecord, seconds: float = 4.0) -> None:
    """Let three slow iterations and a search of plans lead to a decision."""
    run.state.plan_drift.restart_seconds = 1.0
    for _ in range(3):
        end_iteration(run, seconds)
    drift.take_forecasts(run, "it drifts", plan(2, 2.0), best)


def facts(run: JobRun) -> dict[str, Any]:
    found: dict[str, Any] = run.journal.job()[REPLANNING_KEY]
    return found


def test_the_drift_is_measured_over_predicted_seconds_of_ordinary_iterations(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.times.seconds = {"Generating": 1.0, "Training": 2.0, "Checkpointing": 9.0}
    assert plan_drift_metrics(run) == {"plan/drift": 3.0}
    run.times.seconds["Recovering"] = 0.1
    assert plan_drift_metrics(run) == {"plan/drift": 3.0}, "colocated ranks are loaded for a checkpoint"
    run.times.seconds["Recovering"] = 0.4
    assert not plan_drift_metrics(run)
    run.times.seconds = {"Starting": 0.1}
    assert not plan_drift_metrics(run)
    run.state.plan_drift.first = True
    run.times.seconds = {"Training": 2.0}
    assert not plan_drift_metrics(run), "this process may have seen its end only"
    drift.iteration_ended(run)
    assert not run.state.plan_drift.measured
    assert plan_drift_metrics(run) == {"plan/drift": 2.0}
    disabled = start(tmp_path / "disabled", "Disabled")
    disabled.times.seconds = {"Training": 2.0}
    assert not plan_drift_metrics(disabled)
    drift.iteration_ended(disabled)
    assert REPLANNING_KEY not in disabled.journal.job()


@pytest.mark.parametrize("mode", ["Report", "Auto"])
def test_a_decision_is_journaled_and_begins_a_new_count(tmp_path: Path, mode: str) -> None:
    run = start(tmp_path, mode)
    decide(run, plan(4, 1.0))
    state = run.state.plan_drift
    assert state.words.startswith("it drifts: ")
    assert "4 workers is predicted to save 2 s per iteration" in state.words
    assert facts(run)["words"] == state.words
    assert facts(run)["predicted"] == state.predicted == 4.0
    assert not state.measured
    assert ("pending" in facts(run)) == (mode == "Auto")
    drift.adopt_at_checkpoint(run)
    assert run.state.stop is None, "no checkpoint"
    run.state.checkpoint.newest = run.state.iteration + 1
    drift.adopt_at_checkpoint(run)
    assert (run.state.stop is not None) == (mode == "Auto")
    taken = recorded_plan(run.journal)
    assert taken is not None
    assert taken.summary == ("4 workers" if mode == "Auto" else "2 workers")


def test_another_start_knows_the_prediction_the_pending_plan_and_the_cost(tmp_path: Path) -> None:
    before = start(tmp_path)
    decide(before, plan(4, 1.0))
    run = start(tmp_path)
    state = run.state.plan_drift
    assert (state.predicted, state.gain_seconds) == (4.0, 2.0)
    assert state.pending is not None
    assert state.pending.summary == "4 workers"
    assert state.words == before.state.plan_drift.words
    assert start(tmp_path, "Report").state.plan_drift.pending is None


def test_a_plan_that_no_longer_pays_at_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    run = start(tmp_path)
    decide(run, plan(4, 1.0))
    run.state.ledger.iteration = ITERATIONS - 2
    run.state.checkpoint.newest = ITERATIONS - 1
    drift.adopt_at_checkpoint(run)
    assert run.state.stop is None
    assert "would save too little in 1 iterations" in facts(run)["words"]
    assert "pending" not in facts(run)


def test_the_same_plan_and_a_slower_one_change_nothing(tmp_path: Path) -> None:
    run = start(tmp_path)
    for best in (plan(2, 2.0), plan(4, 3.0)):
        decide(run, best)
        assert run.state.plan_drift.pending is None
        assert "the plan stays, because no other plan is predicted to be faster" in run.state.plan_drift.words


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(died=st.sampled_from(("before the decision", "after it", "after the change", "after the next start")))
def test_a_restart_at_any_line_neither_repeats_nor_loses_the_change(
    tmp_path_factory: pytest.TempPathFactory, died: str
) -> None:
    folder = tmp_path_factory.mktemp("job")
    run = start(folder)
    old = run.context.job
    if died == "before the decision":
        for _ in range(2):
            end_iteration(run, 4.0)
        run = start(folder)
        assert not run.state.plan_drift.measured, "it measures again"
    decide(run, plan(4, 1.0, run.context.device_plan.request if run.context.device_plan else ""))
    if died == "after it":
        run = start(folder)
        run.state.ledger.iteration = 8
    run.state.checkpoint.newest = run.state.iteration + 1
    drift.adopt_at_checkpoint(run)
    adopted = recorded_plan(run.journal)
    assert adopted is not None
    assert (adopted.summary, adopted.since) == ("4 workers", 9)
    assert drift.is_adopted(run.journal)
    if died == "after the change":  # its supervisor starts it with the job file of the old plan
        again = begin_in_process(folder, old)[0]
        again.context = replace(again.context, device_plan=adopted)
        drift.begin(again)
        assert again.state.stop is not None
        assert drift.is_adopted(again.journal)
    changed = start(folder)
    assert changed.context.spec.generation.replicas == 4
    assert changed.state.stop is None
    assert not drift.is_adopted(changed.journal)
    assert changed.state.plan_drift.predicted == 2.0, "the measured seconds without the gain"
    if died == "after the next start":
        changed = start(folder)
        assert changed.state.stop is None
        assert changed.context.spec.generation.replicas == 4
    assert changed.state.plan_drift.pending is None
    assert planned_job(old, adopted.sizes).spec == changed.context.spec


def test_the_measured_change_counts_unless_the_job_was_paused_in_between(tmp_path: Path) -> None:
    run = start(tmp_path)
    for seconds, counted in ((30.0, True), (3600.0, False)):
        state = run.state.plan_drift
        state.restart_seconds, state.process_seconds = 0.0, 1.0
        state.adopted_ns = time.time_ns() - round(seconds * 1e9)
        end_iteration(run, 4.0)
        assert state.adopted_ns == 0
        assert (state.restart_seconds > 20) == counted


def test_facts_of_no_use_are_left_out(tmp_path: Path) -> None:
    run = start(tmp_path)
    broken = {"predicted": "soon", "restartSeconds": -1, "pending": {"sizes": 3}, "words": 7}
    run.journal.write_job(run.journal.job() | {REPLANNING_KEY: broken})
    state = start(tmp_path).state.plan_drift
    assert (state.predicted, state.restart_seconds, state.pending) == (1.0, 0.0, None)


def test_a_new_request_drops_decisions_about_the_old_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    decide(run, plan(4, 1.0))
    written = run.journal.job()
    written[PLAN_KEY] = written_plan(plan(2, 1.0, "another request"))
    run.journal.write_job(written)
    assert start(tmp_path).state.plan_drift.pending is None


def test_the_last_decision_is_shown(tmp_path: Path) -> None:
    run = start(tmp_path)
    decide(run, plan(4, 1.0))
    assert drift.last_decision(tmp_path / "run") == run.state.plan_drift.words
    assert drift.last_decision(tmp_path / "nothing") == ""
    (tmp_path / "run" / "journal" / "job.json").write_text("{")
    assert drift.last_decision(tmp_path / "run") == ""
