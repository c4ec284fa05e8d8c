"""The coordinator over real gRPC with simulated workers: whole jobs, and the recovery from kills."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, SimulatedWorker, crew
from tests.support.loopback import free_address

from rlhf_api.algorithms import ALGORITHMS, full_graph, graph_of
from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import ExitCode, Group
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.trackers.facts_jsonl import read_facts
from rlhf_coordinator.service.prometheus import open_endpoint, prometheus_application
from rlhf_coordinator.state import fleet
from rlhf_operator.certificates import new_authority


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give broken sessions time to reconnect before their workers count as lost, on a slow machine too."""
    monkeypatch.setattr(fleet, "GRACE_SECONDS", 60.0)


async def until(condition: Callable[[], bool], event: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {event}"
        await asyncio.sleep(0.005)


def begin(jobs: StartedJobs, folder: Path, *, pace: Pace | None = None, **spec: object) -> tuple[Coordinated, Crew]:
    return jobs.begin(make_job(folder, **spec), folder, pace)  # type: ignore[arg-type]


def certificate_folder(folder: Path) -> Path:
    """Write a certificate of a separate authority."""
    now = datetime.now(UTC)
    new_authority("simulated", now).issue(["127.0.0.1"], now).write(folder)
    return folder


def trained_once(workers: Crew, iterations: int) -> None:
    """Assert that no iteration is trained twice within one group's life, and that the last lineage has no gap."""
    for worker in workers.workers:
        if worker.group is Group.TRAINING:
            lives = {(number, epoch) for number, epoch, _ in worker.trained}
            for life in lives:
                done = [iteration for number, epoch, iteration in worker.trained if (number, epoch) == life]
                assert done == list(range(done[0], done[0] + len(done)))
            assert worker.trained[-1][2] == iterations - 1


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if full_graph(name).generates])
@pytest.mark.parametrize("overlap", ["Enabled", "Disabled"])
async def test_a_job_trains_every_sample_once(jobs: StartedJobs, tmp_path: Path, algorithm: str, overlap: str) -> None:
    inference = {"replicas": 2, "overlap": overlap}
    coordinated, workers = begin(jobs, tmp_path, algorithm=algorithm, iterations=4, inference=inference)
    outcome = await coordinated.outcome()
    assert outcome.phase == "Complete"
    assert await workers.end(60.0) == [0] * 6
    assert {workers[f"training-{rank}"].weights for rank in (0, 1)} == {expected_weights(coordinated.job)}
    trained_once(workers, 4)
    assert workers["training-0"].lengths == [4, 4, 4, 4], "learning rates fall towards the end of the job"
    lines = coordinated.lines
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert all(line["reward"] > 0 for line in lines)
    facts = read_facts(tmp_path / "run" / "facts.jsonl")
    assert [profile.iteration for profile in facts] == [0, 1, 2, 3]
    for profile in facts:
        assert profile.samples is not None
        assert len(profile.samples.scored) == len(profile.samples.finished)
        assert all(end >= begun for begun, end in zip(profile.samples.begun, profile.samples.scored, strict=True))
        assert 0 < sum(profile.phases.values()) <= profile.total * 1.01 + 0.01
    histories = [
        SampleHistories.model_validate_json(line)
        for line in (tmp_path / "run" / "sample-histories.jsonl").read_text().splitlines()
    ]
    assert [history.iteration for history in histories] == [0, 1, 2, 3]
    for history in histories:
        for places, finished, scored in zip(history.places, history.finished, history.scored, strict=True):
            assert finished is not None
            assert scored is not None
            assert places[0][0] <= finished <= scored
    graph = graph_of(coordinated.job.spec)
    if graph.compared_fields:
        assert [line["kl_per_token"] for line in lines] == pytest.approx([0.001] * 4, abs=1e-5)
        lengths = [line["response_tokens_mean"] for line in lines]
        assert [line["kl"] for line in lines] == pytest.approx([0.001 * length for length in lengths], rel=0.01)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["phase"] == "Complete"
    assert summary["iterations"] == 4
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["iteration-000002", "iteration-000004"]
    newest = tmp_path / "checkpoints" / "iteration-000004"
    assert json.loads((newest / "checkpoint.json").read_text())["version"] == 4
    models = set(graph.trained)
    assert {path.name for path in newest.iterdir() if path.is_dir()} == models


async def test_steps_that_were_skipped_are_told_in_words_and_in_the_summary(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(training_metrics={"train/nonfinite_steps": 1.0, "train/nonfinite_steps_total": 3.0})
    coordinated, workers = begin(jobs, tmp_path, iterations=1, pace=pace)
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end(60.0)
    (reported,) = coordinated.messages("steps-skipped")
    why = "because a loss or gradient was infinite or NaN"
    assert reported == f"iteration 0: 1 optimizer step was skipped, {why}; 3 so far in this job"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["nonfinite_steps"] == 3


async def test_workers_that_die_lose_nothing(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=2)
    coordinated, workers = begin(jobs, tmp_path, iterations=6, batch=24, pace=pace)
    victims = workers.victims(seed=1)
    for number in range(6):  # the last iteration is not disturbed: a rank that is lost after it has no weights
        await coordinated.until("Generating", number % 5)
        await asyncio.sleep(0.01 * number)
        next(victims).kill()
    outcome = await coordinated.outcome()
    assert outcome.phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == workers["training-1"].weights == expected_weights(coordinated.job)


async def test_broken_sessions_give_back_tokens_and_keep_the_training_group(
    jobs: StartedJobs, tmp_path: Path, patient: None
) -> None:
    coordinated, workers = begin(jobs, tmp_path, iterations=4, pace=Pace(tokens_per_tick=1, train_seconds=0.1))
    await coordinated.until("Generating", 1)
    await asyncio.sleep(0.05)
    for worker in workers.workers:
        worker.drop_session()
    await coordinated.until("Training", 2)
    workers["training-0"].drop_session()
    outcome = await coordinated.outcome()
    assert outcome.phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert {epoch for _, epoch, _ in workers["training-1"].trained} == {1}
    assert coordinated.run is not None
    assert coordinated.run.totals.group_restarts == 0


async def test_a_lost_rank_restarts_its_group_which_replays(jobs: StartedJobs, tmp_path: Path) -> None:
    coordinated, workers = begin(jobs, tmp_path, iterations=5, every=2, pace=Pace(train_seconds=0.1))
    await coordinated.until("Training", 3)
    workers["training-1"].kill()
    outcome = await coordinated.outcome()
    assert outcome.phase == "Complete"
    await workers.end()
    assert {workers[f"training-{rank}"].weights for rank in (0, 1)} == {expected_weights(coordinated.job)}
    survivor = workers["training-0"]
    assert [order.code for order in survivor.exits] == [ExitCode.RESTART, ExitCode.OK]
    # The newest checkpoint before was of version 2: iteration 2 is replayed, 3 is trained on for the first time.
    assert [iteration for _, epoch, iteration in survivor.trained if epoch == 2] == [2, 3, 4]


async def test_the_coordinator_goes_on_after_it_is_gone(jobs: StartedJobs, tmp_path: Path, patient: None) -> None:
    coordinated, workers = begin(jobs, tmp_path, iterations=5, pace=Pace(tokens_per_tick=2, train_seconds=0.05))
    for phase, iteration in (("Generating", 0), ("Training", 1), ("Publishing", 1), ("Generating", 3)):
        await coordinated.until(phase, iteration)
        await coordinated.cancel()
        coordinated.start()
    outcome = await coordinated.outcome()
    assert outcome.phase == "Complete"
    assert await workers.end(60.0) == [0] * 6
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert {epoch for _, epoch, _ in workers["training-0"].trained} == {1}, "running training was not disturbed"
    assert [line["iteration"] for line in coordinated.lines] == list(range(5))


async def test_a_coordinator_that_dies_beside_its_newest_checkpoint_knows_where_it_is(
    jobs: StartedJobs, tmp_path: Path, patient: None
) -> None:
    job = {"iterations": 3, "checkpoints": {"path": str(tmp_path / "checkpoints"), "every": 1, "keep": 1}}
    coordinated, workers = begin(jobs, tmp_path, pace=Pace(tokens_per_tick=4), **job)
    for iteration in (1, 2, 3):
        await coordinated.until_checkpoint(iteration)
        await coordinated.cancel()
        assert coordinated.start().state.iteration in (iteration - 1, iteration)
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert [iteration for *_, iteration in workers["training-0"].trained] == [0, 1, 2]
    coordinated.start()
    assert (await coordinated.outcome()).phase == "Complete", "a finished job has nothing left to do"


async def test_a_failed_score_is_retried_elsewhere_then_ends_the_job(jobs: StartedJobs, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def flaky(sample: pb.ScoreSample, task: str, tries: int) -> pb.ScoredSample | None:
        broken = sample.key.sample == 3 and task == "reward"
        if not broken or (sample.key.iteration == 0 and len(asked) >= 2):
            return None
        asked.append((sample.key.iteration, tries))
        failure = pb.Failure(reason="RewardRaised", message="KeyError: 'answer'", retryable=True)
        return pb.ScoredSample(key=sample.key, task=task, failure=failure)

    pace = Pace(tokens_per_tick=0, fail_score=flaky)
    coordinated, workers = begin(jobs, tmp_path, algorithm="grpo", iterations=3, pace=pace)
    await until(lambda: all("inference" in workers[f"inference-{n}"].roles for n in (0, 1)), "both to score")
    pace.tokens_per_tick = 8
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.phase == "Failed"
    assert outcome.failure is not None
    assert outcome.failure.exit_code == ExitCode.USER_CODE
    assert outcome.failure.field == "spec.models.reward"
    assert "sample 3 failed 3 times" in outcome.failure.message
    assert "KeyError: 'answer'" in outcome.failure.message
    # Iteration 0 survived two failures, the second attempt on the other worker; iteration 1 used all three attempts.
    assert asked == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1)]
    assert not (tmp_path / "checkpoints" / "iteration-000002").exists()


async def test_nonsense_is_never_taken_for_a_result(jobs: StartedJobs, tmp_path: Path) -> None:
    def nonsense(sample: pb.ScoreSample, task: str, tries: int) -> pb.ScoredSample | None:
        if sample.key.sample != 1 or task != "reward":
            return None
        values = pb.Array(dtype="float32", shape=[1], data=b"\x00\x00\xc0\x7f")
        return pb.ScoredSample(key=sample.key, task=task, result=values)

    coordinated, workers = begin(jobs, tmp_path, pace=Pace(fail_score=nonsense))
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.failure is not None
    assert "not finite" in outcome.failure.message


@pytest.mark.parametrize("failures", [2, 1000])
async def test_a_full_disk_at_checkpoint_time_is_retried_then_ends_the_job(
    jobs: StartedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr("rlhf_coordinator.training.checkpoint_saver.RETRY_SECONDS", 0.1)
    sent: list[pb.Failure] = []

    def full() -> pb.Failure | None:
        if len(sent) >= failures:
            return None
        sent.append(pb.Failure(reason="StorageFull", message="actor/model-stage-00000: No space left on device"))
        return sent[-1]

    coordinated, workers = begin(jobs, tmp_path, iterations=2, pace=Pace(fail_checkpoint=full))
    outcome = await coordinated.outcome()
    await workers.end()
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    if failures == 2:
        assert outcome.phase == "Complete"
        assert names == ["iteration-000002"]
    else:
        assert outcome.failure is not None
        assert outcome.failure.exit_code == ExitCode.STORAGE
        assert outcome.failure.field == "spec.checkpoints.path"
        assert "No space left on device" in outcome.failure.message
        assert names == [], "nothing half-written"


async def test_mutual_tls_lets_in_only_the_jobs_own(jobs: StartedJobs, tmp_path: Path) -> None:
    ours, others = certificate_folder(tmp_path / "ours"), certificate_folder(tmp_path / "others")
    coordinated = jobs.start(make_job(tmp_path, iterations=1), tmp_path, ours)
    strangers = [crew({Group.GENERATION: 1}, coordinated.address, certificates=folder) for folder in (others, None)]
    await asyncio.sleep(0.3)
    assert coordinated.run is not None
    assert not any(worker.seen for worker in coordinated.run.state.fleet)
    workers = crew(dict(coordinated.counts()), coordinated.address, certificates=ours)
    assert (await coordinated.outcome()).phase == "Complete"
    for group in strangers:
        await group.end(0.0)
    await workers.end()


async def test_metrics_are_served(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace()
    coordinated, workers = begin(jobs, tmp_path, iterations=2, pace=pace)
    await coordinated.until("Generating", 1)
    pace.tokens_per_tick = 0  # it stays in this iteration
    assert coordinated.run is not None
    address = free_address()
    endpoint = open_endpoint(address)
    endpoint.metrics = prometheus_application(coordinated.run)
    text = (await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics")).read().decode()
    endpoint.close()
    pace.tokens_per_tick = 8
    assert "rlhf_iteration 1.0" in text
    assert 'rlhf_phase{phase="Training"}' in text
    assert 'rlhf_iteration_metric{name="reward"}' in text
    assert 'rlhf_phase_seconds_total{phase="Generating"}' in text
    assert "rlhf_unfinished_samples" in text
    assert "rlhf_fusion_threshold 0.0" in text
    assert 'rlhf_migrated_samples_total{by="kv"} 0.0' in text
    await coordinated.outcome()
    await workers.end()


async def test_stopping_checkpoints_and_resuming_goes_on(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=2)
    coordinated, workers = begin(jobs, tmp_path, iterations=5, every=100, pace=pace)
    await coordinated.until("Generating", 3)
    pace.tokens_per_tick = 0  # it stays in this iteration
    async with aio_channel(coordinated.address, None) as channel:
        reply = await CoordinatorStub(channel).Stop(pb.StopRequest(checkpoint=True))
    assert (await coordinated.outcome()).phase == "Stopped"
    assert await workers.end(60.0) == [0] * 6
    assert reply.iteration == 3
    assert reply.checkpoint.endswith("iteration-000003")
    # The run folder has the journal, which continues.
    coordinated.start()
    workers = crew(dict(coordinated.counts()), coordinated.address)
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert workers["training-0"].trained[0][2] == 3


async def test_status_names_what_is_waited_for(jobs: StartedJobs, tmp_path: Path) -> None:
    coordinated = jobs.start(make_job(tmp_path), tmp_path)
    async with aio_channel(coordinated.address, None) as channel:
        stub = CoordinatorStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True)
        assert status.phase == "Starting"
        assert any(summary.startswith("generation-1 to register (") for summary in status.waiting_for)
        assert status.ledger["queued"] == 16
        pace = Pace(tokens_per_tick=0)  # it generates until a status was read
        workers, phases = None, []
        async for status in stub.WatchStatus(pb.WatchStatusRequest(max_rate_hz=20)):
            phases.append(status.phase)
            workers = workers or crew(dict(coordinated.counts()), coordinated.address, pace=pace)
            pace.tokens_per_tick = 8 if status.phase == "Generating" else pace.tokens_per_tick
    assert phases[0] == "Starting"
    assert phases[-1] == "Complete"
    assert workers is not None
    await workers.end()


def refused(worker: SimulatedWorker, words: str) -> bool:
    """Return whether the coordinator has refused a worker with this message."""
    return any(words in text for text in worker.refusals)


async def test_strangers_and_doubles_are_refused_with_a_reason(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=0)
    coordinated, workers = begin(jobs, tmp_path, iterations=4, pace=pace)
    await until(lambda: all(worker.registered for worker in workers.workers), "all workers")
    strangers = crew({Group.GENERATION: 3}, coordinated.address)
    for name, why in (("generation-0", "already connected from another live process"), ("generation-2", "not part of")):
        await until(partial(refused, strangers[name], why), f"{name} to be refused")
    pace.tokens_per_tick = 8
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    await strangers.end(0.0)
    assert workers["training-0"].weights == expected_weights(coordinated.job)
