"""A real job whose ranks share a pod trains the weights of one with a pod per rank, although processes are killed."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, run_job
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

SEED = 66
"""Seed of the moments of kills; printed with every kill when the test fails."""
PROCESSES = ("training-0", "training-1", "training-pod-0")


@pytest.mark.timeout(1500)
def test_ranks_and_their_launcher_are_killed_and_the_weights_are_those_of_a_pod_a_rank(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=5, every=2)
    undisturbed = run_job(manifest, tmp_path / "undisturbed")
    assert undisturbed.code == 0, undisturbed.output[-4000:]
    first = ("training-1", "training-pod-0", "training-0")
    kills = Kills(SEED, len(first), PROCESSES, first=first, longest_calm_seconds=0.5, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", options=["--set", "spec.training.ranksPerPod=2"], kills=kills)
    assert killed.code == 0, f"{killed.kills}\n{killed.output[-4000:]}"
    assert len(killed.kills) == len(first), killed.kills
    assert killed.weights == undisturbed.weights != "", killed.kills
    assert (
        "training-1 ended with signal 9 (killed, or out of memory), and the ranks of its pod with it" in killed.output
    )
