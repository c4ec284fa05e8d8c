"""A real job whose ranks have sharded models completes, and killed ranks change no weight."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

SEED = 21
"""Seed of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.timeout(900)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=4, every=2)
    sizes = {"pipeline": 1, "data": 2, "shard": 2}
    options = [part for name, size in sizes.items() for part in ("--set", f"spec.training.parallelism.{name}={size}")]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEED)
