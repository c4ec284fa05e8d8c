"""A real job whose ranks hold the models in parts: it ends, and ranks killed on the way change no weight."""

from pathlib import Path

import pytest
from tests.support.chaos import Kills, run_job
from tests.support.local_job import PROCESSES, write_job

SEED = 21
"""Of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=4, every=2)
    sizes = {"pipeline": 1, "data": 2, "shard": 2}
    options = [part for name, size in sizes.items() for part in ("--set", f"spec.training.parallelism.{name}={size}")]
    undisturbed = run_job(manifest, tmp_path / "undisturbed", options=options)
    assert undisturbed.code == 0, undisturbed.output[-4000:]
    ranks = ("training-1", "training-0")
    kills = Kills(SEED, len(ranks), PROCESSES, first=ranks, longest_calm_seconds=0.5, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", options=options, kills=kills)
    assert killed.code == 0, f"{killed.kills}\n{killed.output[-4000:]}"
    assert len(killed.kills) == len(ranks), killed.kills
    assert killed.weights == undisturbed.weights != "", killed.kills
