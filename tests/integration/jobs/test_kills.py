"""A real job whose every process is killed at a random moment trains the same weights as an undisturbed one."""

import random
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import PROCESSES, write_job

ITERATIONS = 20
SEED = 20
"""Seed of the victims' order and moments."""


@pytest.mark.timeout(1800)
def test_every_process_killed_once_and_the_weights_are_the_same(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)
    undisturbed = run_job(manifest, tmp_path / "undisturbed")
    first = list(PROCESSES)
    random.Random(SEED).shuffle(first)
    kills = Kills(SEED, len(first), PROCESSES, first=tuple(first), longest_calm_seconds=0.5, iterations_between=1)
    # Executed: a forked run, which shares the hash seed with others, is compared with one that is not forked.
    killed = run_job(manifest, tmp_path / "killed", kills=kills, executed=True)
    assert_same_weights(killed, undisturbed)
    assert [line["iteration"] for line in killed.lines] == list(range(ITERATIONS))
    assert killed.reported("reward", "tokens") == undisturbed.reported("reward", "tokens")
