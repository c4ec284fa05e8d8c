"""A real job that trains by Megatron's layers: it ends, and ranks killed on the way change no weight."""

from pathlib import Path

import pytest
from tests.support.chaos import Kills, run_job
from tests.support.local_job import PROCESSES, write_job

SEED = 20
"""Of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=6, every=2)
    options = ["--set", "spec.training.backend=megatron"]
    undisturbed = run_job(manifest, tmp_path / "undisturbed", options=options)
    assert undisturbed.code == 0, undisturbed.output[-4000:]
    ranks = ("training-1", "training-0")
    kills = Kills(SEED, len(ranks), PROCESSES, first=ranks, longest_calm_seconds=0.5, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", options=options, kills=kills)
    assert killed.code == 0, f"{killed.kills}\n{killed.output[-4000:]}"
    assert len(killed.kills) == len(ranks), killed.kills
    assert killed.weights == undisturbed.weights != "", killed.kills
