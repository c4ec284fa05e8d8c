"""Idle workers that draft the next iteration's samples change no bit of what is trained, also when one is killed."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

DRAFTS = "generation.speculation"
SEED = 5
"""Seed of the moments of kills."""
SAME = ("iteration", "reward", "tokens", "response_tokens_max", "training/actor/loss")


def test_drafts_ahead_change_no_bit_through_the_kill_of_a_worker_that_drafts(tmp_path: Path) -> None:
    """Ranks train without drafting workers in one run, and in the other a worker is killed while it drafts."""
    manifest = write_job(tmp_path, algorithm="grpo", iterations=5, responses=48, learning_rate=1e-4)
    fixed = (f"{DRAFTS}.mode=Fixed", f"{DRAFTS}.drafters=[Siblings]")
    without = run_job(manifest, tmp_path / "without", settings=fixed)
    victims = ("generation-0", "generation-1", "coordinator")
    kills = Kills(SEED, len(victims), victims, first=victims, in_phases=("Training", "Generating", "Training"))
    ahead = run_job(manifest, tmp_path / "ahead", settings=(*fixed, f"{DRAFTS}.ahead=Auto"), kills=kills)
    assert_same_weights(without, ahead)
    assert without.reported(*SAME) == ahead.reported(*SAME)
    assert not any("ahead/drafted_tokens" in line for line in without.lines)
    assert ahead.total("ahead/drafted_tokens") > 0, str(ahead)
    assert ahead.total("ahead/right_tokens") > 0, str(ahead)
    assert ahead.total("ahead/idle_seconds") > 0
    last = (without.lines[-1], ahead.lines[-1])
    assert last[1]["speculation/tokens_per_step"] > last[0]["speculation/tokens_per_step"]
