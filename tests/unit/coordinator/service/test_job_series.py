"""A job's coordinator serves all metrics of the catalogue, with correct values."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, crew
from tests.support.observability.served_metrics import check_catalogue, never_absent, scraped, value

from rlhf_common import control_pb2 as pb
from rlhf_common.metrics.exposition import registry_of
from rlhf_common.metrics.labels import STAGES
from rlhf_common.metrics.metric import Server
from rlhf_common.names import Group
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.service.prometheus import JobCollector, prometheus_application
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

FUSED = {"intraStage": {"mode": "Disabled"}, "interStage": {"mode": "Fixed", "threshold": 6, "pool": 1}}
MEASURED = {
    "actor/mismatch": 0.001,
    "gradient_norm/actor": 2.0,
    "learning_rate/critic": 1e-4,
    "bubble_share": 0.25,
    "bubble_seconds": 0.01,
    "step_seconds": 0.04,
    "train/skipped_steps": 0.0,
    "train/nonfinite_steps_total": 2.0,
    "my/own": 7.0,
}


@pytest.fixture
async def trained(tmp_path: Path) -> AsyncIterator[JobRun]:
    """Run a job that trains three iterations with simulated workers."""
    coordinated = Coordinated(make_job(tmp_path, fusion=FUSED), tmp_path / "run")
    run = coordinated.start()
    workers: Crew = crew(dict(coordinated.counts()), coordinated.address, pace=Pace(training_metrics=MEASURED))
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    yield run
    await coordinated.cancel()


async def test_a_trained_job_serves_the_catalogue_and_the_truth(trained: JobRun) -> None:
    registry = registry_of([JobCollector(trained)])
    check_catalogue(registry, Server.COORDINATOR)
    never_absent(registry, Server.COORDINATOR)
    assert value(registry, "rlhf_iteration_seconds_count") == 3
    assert value(registry, "rlhf_response_tokens_count") == value(registry, "rlhf_finished_samples_total") == 3 * 16
    assert value(registry, "rlhf_sample_queue_seconds_count") == value(registry, "rlhf_sample_generation_seconds_count")
    for task in trained.context.tasks:
        assert value(registry, "rlhf_scoring_latency_seconds_count", task=task.name) == 3 * 16
    assert value(registry, "rlhf_time_to_first_score_seconds_count") == 3
    assert value(registry, "rlhf_training_step_seconds_count") == 3
    assert value(registry, "rlhf_weight_update_seconds_count") > 0
    assert value(registry, "rlhf_checkpoint_seconds_count") == 2
    assert value(registry, "rlhf_policy_mismatch", model="actor") == 0.001
    assert value(registry, "rlhf_gradient_norm", model="actor") == 2
    assert value(registry, "rlhf_learning_rate", model="critic") == 1e-4
    assert value(registry, "rlhf_training_bubble_ratio", source="measured") == 0.25
    assert value(registry, "rlhf_nonfinite_steps_total") == 2
    assert value(registry, "rlhf_iteration_metric", name="training/my/own") == 7
    moved = value(registry, "rlhf_migrated_samples_total", by="kv")
    assert moved == value(registry, "rlhf_migration_seconds_count") == trained.totals.moved_kv
    assert value(registry, "rlhf_started_timestamp_seconds") < value(registry, "rlhf_checkpoint_timestamp_seconds")


async def test_stages_add_up_to_the_iteration(trained: JobRun) -> None:
    registry = registry_of([JobCollector(trained)])
    seconds = value(registry, "rlhf_iteration_last_seconds")
    assert value(registry, "rlhf_iteration_stage_seconds") == pytest.approx(seconds)
    stages = {s.labels["stage"] for s in scraped(registry) if s.name == "rlhf_stage_seconds_total"}
    assert stages == set(STAGES)
    assert value(registry, "rlhf_stage_seconds_total") == pytest.approx(value(registry, "rlhf_phase_seconds_total"))


async def test_a_bucket_leads_to_the_worker_and_the_sample(trained: JobRun) -> None:
    registry = registry_of([JobCollector(trained)])
    shown = [s.exemplar for s in scraped(registry) if s.name == "rlhf_response_tokens_bucket" and s.exemplar]
    assert shown
    for exemplar in shown:
        assert exemplar.labels["worker"].startswith("generation-")
        assert 0 <= int(exemplar.labels["iteration"]) < 3
        assert 0 <= int(exemplar.labels["sample"]) < 16
        if exemplar.labels["iteration"] == "2":  # the one that the ledger still has
            assert exemplar.value == len(trained.state.ledger.samples[int(exemplar.labels["sample"])].response)


def test_what_waits_for_nothing_yet_is_absent_and_not_zero(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path, checkpoints=None))
    registry = registry_of([JobCollector(run)])
    check_catalogue(registry, Server.COORDINATOR)
    names = {sample.name for sample in scraped(registry)}
    assert not names & {"rlhf_reward_mean", "rlhf_checkpoint_timestamp_seconds", "rlhf_fusion_gain_ratio", "rlhf_kl"}
    assert value(registry, "rlhf_phase", phase="Starting") == 1


def test_a_worker_that_left_has_no_series(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path, generation={"replicas": 3, "maxBatchSize": 6}))
    registry = registry_of([JobCollector(run)])
    assert value(registry, "rlhf_worker_state", worker="generation-2") == 1
    run.state.fleet.resize({"generation": 2}, 0.0)
    assert not [sample for sample in scraped(registry) if sample.labels.get("worker") == "generation-2"]
    assert value(registry, "rlhf_workers_wanted", group="generation") == 2


def test_a_job_with_metrics_disabled_measures_and_serves_nothing(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path, metrics="Disabled"))
    said: list[str] = []
    page = b"".join(prometheus_application(run)({}, lambda status, _: said.append(status)))
    assert said == ["404 Not Found"]
    assert b"spec.metrics" in page
    assert not run.histograms.families()


def test_a_scrape_reads_on_while_the_loop_changes_what_it_reads(tmp_path: Path) -> None:
    """Dictionaries that grow during iteration raise RuntimeError in the reader."""
    run, _ = begin_in_process(tmp_path, make_job(tmp_path, generation={"replicas": 8, "maxBatchSize": 6}))
    registry, over = registry_of([JobCollector(run)]), threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            run.state.fusion.busy.setdefault("generation-0", {})[str(number % 50)] = 0.1
            command = PendingCommand(CommandKind.GENERATE, 0.0, "take samples")
            run.state.fleet.workers["generation-0"].pending[number % 50] = command
            run.state.fleet.workers["generation-0"].pending.pop((number + 25) % 50, None)
            run.totals.gpu_time.idle[Group.GENERATION, str(number % 50)] = 1.0
            run.totals.gpu_time.idle.pop((Group.GENERATION, str((number + 25) % 50)), None)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(30):
            assert value(registry, "rlhf_worker_state", worker="generation-0") == 1
    finally:
        over.set()
        changing.join()


def test_counters_never_fall_within_a_phase_change(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path))
    before = run.totals.phases
    after = before.entered("Generating", before.since + 2, before.since_ns + 2)
    assert after.until(after.since + 1) == {"Starting": 2.0, "Generating": 1.0}
    assert before.until(before.since + 2)["Starting"] == 2.0
    assert after.entered("Recovering", after.since, 0).recoveries == 1


def test_a_score_that_failed_and_a_message_without_sense_are_counted(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path))
    registry = registry_of([JobCollector(run)])
    assert value(registry, "rlhf_score_failures_total", task="reward") == 0
    run.totals.score_failures["reward"] += 1
    assert value(registry, "rlhf_score_failures_total", task="reward") == 1


def test_a_step_that_claims_to_have_taken_days_is_left_out(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path))
    handlers = EventHandlers(run, CheckpointSaver(run))
    for seconds in (1, 10**7):
        step = pb.Observation(end_ns=seconds * 10**9, train_step=pb.TrainStepObservation())
        handlers.message("training-0", pb.WorkerMessage(observation=step))
    assert value(registry_of([JobCollector(run)]), "rlhf_training_step_seconds_count") == 1
