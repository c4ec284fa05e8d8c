"""Training ranks in generation workers, over real gRPC with simulated workers: they take turns despite kills."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew
from tests.support.manifests.header_job import write_header_job

from rlhf_coordinator.state import fleet

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SECONDS = 120.0
FUSED = {"mode": "Fixed", "threshold": 5, "pool": 1}
KILLS = 8
SEED = 11


def begin(jobs: StartedJobs, folder: Path, pace: Pace | None = None, **spec: Any) -> tuple[Coordinated, Crew]:
    fusion = {"intraStage": {"mode": "Disabled"}, "interStage": FUSED}
    parts = {"fusion": fusion, "placement": "Colocated", "inference": {"replicas": 0}, **spec}
    return jobs.begin(make_job(folder, **parts), folder, pace)


def clashes(workers: Crew) -> list[str]:
    return [f"{worker.name}: {kind}" for worker in workers.workers for kind in worker.clashes]


async def test_generation_workers_decode_score_and_train_in_turn(jobs: StartedJobs, tmp_path: Path) -> None:
    coordinated, workers = begin(jobs, tmp_path)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert [worker.name for worker in workers.workers] == ["generation-0", "generation-1"]
    for worker in workers.workers:
        assert worker.weights == expected_weights(coordinated.job)
        assert [iteration for _, _, iteration in worker.trained] == [0, 1, 2]
    assert clashes(workers) == []


async def test_a_rank_that_is_lost_with_its_samples_restarts_the_group_and_nothing_else_changes(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    pace = Pace(tokens_per_tick=1, train_seconds=0.05)
    # This many kills within one iteration would look as if one of its samples were the cause.
    rollout = {"batchSize": 16, "maxResponseTokens": 48, "sampleRetries": KILLS}
    coordinated, workers = begin(jobs, tmp_path, pace, iterations=4, rollout=rollout)
    ended = asyncio.create_task(coordinated.outcome(SECONDS))
    victims = workers.victims(SEED)
    for number in range(KILLS):
        await asyncio.sleep(0.1 + 0.07 * number)
        next(victims).kill()
    assert (await ended).phase == "Complete"
    await workers.end()
    weights = {
        worker.weights for worker in workers.workers if worker.weights
    }  # one lost after the last training has none
    assert weights == {expected_weights(coordinated.job)}
    assert clashes(workers) == []


async def test_a_coordinator_that_comes_back_goes_on_with_the_ranks_it_finds(
    jobs: StartedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "GRACE_SECONDS", 60.0)  # they are back before they count as lost
    coordinated, workers = begin(jobs, tmp_path, Pace(tokens_per_tick=1))
    await coordinated.until("Generating", 1)
    await coordinated.cancel()
    coordinated.start()
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert {worker.weights for worker in workers.workers} == {expected_weights(coordinated.job)}
    assert len({number for worker in workers.workers for number, _, _ in worker.trained}) == 2, "nobody restarted"
    assert clashes(workers) == []


async def test_a_device_that_cannot_hold_a_phase_ends_the_job_before_anything_is_loaded(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    coordinated, workers = begin(jobs, tmp_path, generation={"replicas": 2, "gpusPerReplica": 1})
    shutil.rmtree(tmp_path / "policy")
    write_header_job(tmp_path, {})
    for worker in workers.workers:
        worker.device, worker.device_memory = "cuda:0", 1_000_000
    outcome = await coordinated.outcome(SECONDS)
    await workers.end()
    assert outcome.failure is not None
    assert (outcome.phase, outcome.failure.reason) == ("Failed", "DoesNotFit")
    assert "phase decoding and scoring needs" in outcome.failure.message
    assert not any(worker.roles for worker in workers.workers)
