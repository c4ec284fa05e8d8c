"""Incremental scoring over real gRPC with simulated workers: despite kills nothing is lost or scored twice."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew

from rlhf_planner.inter_stage import incremental_gain

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SECONDS = 120.0
STRIKES = 20
"""Number of kills; a slow machine must complete as many as a fast one."""
ROLLOUT = {"batchSize": 16, "maxResponseTokens": 400}


def begin(
    jobs: StartedJobs, folder: Path, pace: Pace, *, iterations: int = 3, **inference: Any
) -> tuple[Coordinated, Crew]:
    job = make_job(folder, iterations=iterations, rollout=ROLLOUT, inference={"replicas": 2, **inference})
    return jobs.begin(job, folder, pace)


@pytest.mark.parametrize("incremental", ["Disabled", "Enabled"])
async def test_scores_are_those_of_a_job_without(jobs: StartedJobs, tmp_path: Path, incremental: str) -> None:
    coordinated, workers = begin(jobs, tmp_path, Pace(tokens_per_tick=4), incremental=incremental)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    asked = sum(worker.prefixes for worker in workers.workers)
    if incremental == "Disabled":
        assert asked == 0
        assert not any("incremental/on" in line for line in coordinated.lines)
        return
    assert asked > 0
    assert any(line["incremental/early_share"] > 0 for line in coordinated.lines)
    scores = Counter(score for worker in workers.workers for score in worker.scored)
    assert set(scores.values()) == {1}, "every task once"


@pytest.mark.parametrize("token_seconds", [5e-5, 1e-9])
async def test_auto_goes_by_the_last_iteration(
    jobs: StartedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_seconds: float
) -> None:
    # Scoring time is simulated and decoding time is real, so on a slow machine the gain is a small share.
    monkeypatch.setattr(incremental_gain, "MIN_GAIN", 1e-4)
    pace = Pace(tokens_per_tick=4, token_seconds=token_seconds)
    coordinated, workers = begin(jobs, tmp_path, pace, iterations=5, incremental="Auto", replicas=1)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    reported = coordinated.lines
    worth = token_seconds > 1e-6
    assert (reported[0]["incremental/on"], reported[0]["incremental/early_share"]) == (0, 0)
    assert (reported[-1]["incremental/on"], reported[-1]["incremental/early_share"] > 0) == (worth, worth)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert ("incremental-choice" in events) == worth
    if worth:
        assert reported[-1]["incremental/predicted_gain_seconds"] > 0.01


@pytest.mark.parametrize(("seed", "incremental"), [(0, "Enabled"), (2, "Auto")])
async def test_whoever_dies_the_weights_are_the_same(
    jobs: StartedJobs, tmp_path: Path, seed: int, incremental: str
) -> None:
    rng = random.Random(seed)
    pace = Pace(tokens_per_tick=4, score_seconds=0.002, token_seconds=5e-6, most_prefixes=rng.choice([0, 3, 1000]))
    coordinated, workers = begin(jobs, tmp_path, pace, incremental=incremental)
    run = coordinated.run
    for _ in range(STRIKES):
        await asyncio.sleep(rng.uniform(0.05, 0.3))
        if run is None or run.over.is_set():
            break
        victim = workers[f"{rng.choice(['generation', 'inference', 'inference'])}-{rng.randrange(2)}"]
        kind = rng.choice(["kill", "drop", "coordinator", "none"])
        if kind == "kill":
            victim.kill()
        elif kind == "drop":
            victim.drop_session()
        elif kind == "coordinator":
            await coordinated.cancel()
            run = coordinated.start()
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert sum(worker.prefixes for worker in workers.workers) > 0 or incremental == "Auto"
