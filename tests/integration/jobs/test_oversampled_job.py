"""A job that starts more prompts than it trains on, in a real local run whose processes are killed."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 8
BATCH, SIBLINGS, MORE = 16, 4, 2
SEED = 11
"""Seed of the moments of kills."""


def test_every_iteration_trains_on_a_whole_batch_and_cuts_off_the_rest(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, every=2)
    settings = ("deterministic=false", f"rollout.oversample={MORE}", "samples.every=1")
    kills = Kills(SEED, 2, ["training-1", "coordinator"], longest_calm_seconds=0.5, iterations_between=1)
    lines = run_job(manifest, tmp_path / "run", settings=settings, kills=kills).lines
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    for line in lines:
        assert line["samples/cut"] == MORE * SIBLINGS
        assert line["tokens_cut"] >= 0
        assert line["samples/failed"] == line["samples/abstained"] == 0
        assert line["training/reward/mean"] == pytest.approx(line["reward"], abs=1e-6), "the ranks saw the same batch"


def test_a_deterministic_job_cuts_off_the_same_prompts_at_any_pace_and_after_kills(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=48, every=4)
    settings = (f"rollout.oversample={MORE}", "rollout.cutBy=Counts")
    undisturbed = run_job(manifest, tmp_path / "undisturbed", settings=settings)
    victims = ("generation-1", "coordinator", "training-1")
    kills = Kills(SEED, len(victims), victims, first=victims, longest_calm_seconds=0.5, iterations_between=1)
    uneven = (*settings, "generation.engine=tests.support.jobs.uneven_engines")
    killed = run_job(manifest, tmp_path / "killed", settings=uneven, kills=kills)
    assert_same_weights(killed, undisturbed)
    same = ("response_tokens_mean", "response_tokens_max", "tokens", "samples/cut", "reward")
    assert killed.reported(*same) == undisturbed.reported(*same)
    assert all(line["samples/cut"] == MORE * SIBLINGS for line in killed.lines)
